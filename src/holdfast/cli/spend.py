"""`holdfast spend`: what models cost, and correcting what nobody knows."""

from __future__ import annotations

from dataclasses import asdict
from decimal import Decimal
from typing import Annotated, Any, cast

import typer

from .. import store
from ..errors import NotFound
from ..spend import SPEND_STATES, Spend, SpendGroup, SpendState, Spent
from .completion import one_of
from .groups import group
from .options import AsJson, Limit, Namespace, OfSession, Url
from .output import print_json
from .showing import say, show_table, when, with_iso_times

app = group("Look at what models cost, and correct what nobody knows.")


@app.command("list")
def list_spend(
    url: Url = None,
    namespace: Namespace = None,
    session: OfSession = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="open, settled, failed or uncertain.",
            autocompletion=one_of(SPEND_STATES),
        ),
    ] = None,
    after: Annotated[
        int, typer.Option("--after", metavar="NUMBER", help="Continue after this number.")
    ] = 0,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List attempts at models, the oldest first. An uncertain one counts with an estimate."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        wanted = cast("SpendState | None", state)
        found = opened.spends(session=session, state=wanted, after=after, limit=limit)
    next_after = found[-1].number if len(found) == limit else None
    if as_json:
        print_json({"spend": list(map(_data, found)), "next_after": next_after})
        return
    headings = ("number", "session", "model", "source", "state", "tokens", "usd", "created")
    dropped = ("source", "tokens", "session")
    show_table(headings, map(_line, found), drop=dropped, empty="No attempts at models.")
    if next_after is not None:
        say(f"\nThere may be more: --after {next_after}")


@app.command()
def sums(
    url: Url = None,
    namespace: Namespace = None,
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT", help="session, model or day (UTC).")
    ] = "model",
    session: OfSession = None,
    as_json: AsJson = False,
) -> None:
    """Sum up what was spent, by session, model or day."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        found = opened.spending(cast("Any", by), session=session)
    if as_json:
        print_json({"by": by, "sums": list(map(_data, found))})
        return
    headings = (by, "attempts", "tokens in", "tokens out", "usd", "of it uncertain", "unpriced")
    lines = (
        (
            each.name, each.attempts, each.input_tokens, each.output_tokens, money(each.usd),
            money(each.uncertain_usd), each.unpriced,
        )
        for each in found
    )  # fmt: skip
    dropped = ("unpriced", "tokens in", "tokens out")
    show_table(headings, lines, drop=dropped, empty="Nothing was spent.")


@app.command()
def correct(
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", help="The attempt, as `spend list` shows it.")
    ],
    usd: Annotated[str, typer.Option("--usd", metavar="AMOUNT", help="What it cost.")],
    url: Url = None,
    namespace: Namespace = None,
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", metavar="N", help="Tokens that it read.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", metavar="N", help="Tokens that it wrote.")
    ] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who says so.")] = None,
    note: Annotated[
        str | None, typer.Option("--note", metavar="TEXT", help="How it is known.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Settle an uncertain attempt with what it really cost. It is done once."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.spends(after=number - 1, limit=1) if number > 0 else []
        if not found or found[0].number != number:
            raise NotFound(f"there is no attempt number {number}; `holdfast spend list` shows them")
        tokens = {"input_tokens": input_tokens, "output_tokens": output_tokens}
        fixed = opened.correct_spend(found[0].id, usd=usd, **tokens, by=by, note=note)
    if as_json:
        print_json(_data(fixed))
    else:
        before = money(found[0].usd)
        counted = "without a price" if before is None else f"with ${before}"
        say(f"Attempt {number} cost ${money(fixed.usd)}; it was counted {counted}.")


def cost(spent: Spent) -> dict[str, Any]:
    """Return what a session's page shows of its cost."""
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
    fields = asdict(record)
    amounts = {name: money(fields[name]) for name in fields if name.endswith("usd")}
    return with_iso_times({**fields, **amounts})


def _line(spend: Spend) -> tuple[object, ...]:
    return (
        spend.number, spend.session_id, spend.model, spend.source, spend.state,
        spend.input_tokens + spend.output_tokens, money(spend.usd), when(spend.created_at),
    )  # fmt: skip
