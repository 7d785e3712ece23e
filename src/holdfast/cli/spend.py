"""`holdfast spend`: what models cost, and correcting what is uncertain."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, cast

from ..errors import NotFound
from ..spend import SPEND_STATES, Spend, SpendGroup, SpendState, Spent
from ..store import Store
from . import output
from .command import (
    After,
    Answer,
    Commands,
    Limit,
    OfSession,
    OfTree,
    argument,
    known_id,
    option,
    page,
)

app = Commands("Show what model calls cost, and correct what is uncertain.")


@app.command("list", mode="read")
def list_spend(
    store: Store,
    session: OfSession = None,
    state: Annotated[
        str | None, option("STATE", "open, settled, failed or uncertain.", offers=SPEND_STATES)
    ] = None,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List model calls, oldest first. An uncertain one is counted at its estimate."""
    wanted = cast("SpendState | None", state)
    found = store.spends(session=known_id(store, session), state=wanted, after=after, limit=limit)
    columns: output.Columns = {
        "number": "number",
        "session": "session_id",
        "model": "model",
        "source": "source",
        "state": "state",
        "tokens": lambda each: each.input_tokens + each.output_tokens,
        "usd": lambda each: money(each.usd),
        "created": "created_at",
    }
    dropped = ("source", "tokens", "session")
    return page("spend", found, _data, columns, limit=limit, drop=dropped, empty="No model calls.")


@app.command(mode="read")
def sums(
    store: Store,
    by: Annotated[str, option("WHAT", "session, model or day (UTC).")] = "model",
    session: OfSession = None,
    root: OfTree = None,
    after: Annotated[
        str | None, option("NAME", "Continue after this session, model or day.")
    ] = None,
    limit: Limit = 1000,
) -> Answer:
    """Sum up what was spent, by session, model or day."""
    found = store.spending(
        cast("Any", by),
        session=known_id(store, session),
        root=known_id(store, root, of_root=True),
        after=after,
        limit=limit,
    )
    columns: output.Columns = {
        by: "name",
        "calls": "attempts",
        "tokens in": "input_tokens",
        "tokens out": "output_tokens",
        "usd": lambda each: money(each.usd),
        "uncertain usd": lambda each: money(each.uncertain_usd),
        "unpriced": "unpriced",
    }
    dropped = ("unpriced", "tokens in", "tokens out")
    sums = page(
        "sums", found, _data, columns, limit=limit,
        position="name", drop=dropped, empty="Nothing was spent.",
    )  # fmt: skip
    return Answer({"by": by, **cast("dict[str, Any]", sums.data)}, sums.shown)


@app.command(mode="write")
def correct(
    store: Store,
    number: Annotated[int, argument("NUMBER", "The model call, as `spend list` shows it.")],
    usd: Annotated[str, option("AMOUNT", "What it cost.")],
    input_tokens: Annotated[int | None, option("N", "Tokens that it read.")] = None,
    output_tokens: Annotated[int | None, option("N", "Tokens that it wrote.")] = None,
    by: Annotated[str | None, option("NAME", "Who corrects it.")] = None,
    note: Annotated[str | None, option("TEXT", "How it is known.")] = None,
) -> Answer:
    """Record, once, what an uncertain model call really cost."""
    found = store.spends(after=number - 1, limit=1) if number > 0 else []
    if not found or found[0].number != number:
        raise NotFound(f"there is no model call number {number}; `holdfast spend list` shows them")
    tokens = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    fixed = store.correct_spend(found[0].id, usd=usd, **tokens, by=by, note=note)
    before = money(found[0].usd)
    counted = "without a price" if before is None else f"at ${before}"
    return Answer(
        _data(fixed), f"Model call {number} cost ${money(fixed.usd)}; it was counted {counted}."
    )


def cost(spent: Spent) -> dict[str, Any]:
    """Return what `sessions show` says of a session's cost."""
    return {
        "spent_usd": money(spent.usd),
        "uncertain_usd": money(spent.uncertain_usd),
        "tokens": spent.tokens,
        "model_calls": spent.attempts,
        "unpriced_calls": spent.unpriced,
    }


def money(usd: Decimal | None) -> str | None:
    """Return dollars in plain digits; None where no price is known."""
    return None if usd is None else f"{usd:f}"


def _data(record: Spend | SpendGroup) -> dict[str, Any]:
    fields = output.data(record)
    return fields | {name: money(fields[name]) for name in fields if name.endswith("usd")}
