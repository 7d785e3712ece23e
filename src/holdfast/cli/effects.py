"""`holdfast effects`: look at what tools did, and settle effects whose outcome is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

from ..clock import iso
from ..effects import Landed, NotLanded
from ..errors import InvalidArgument, Unresolved
from ..records import EFFECT_STATUSES, Effect, EffectStatus
from ..store import Store
from . import output
from .command import (
    OFFERED_MAX,
    After,
    Answer,
    Commands,
    Limit,
    Namespace,
    OfSession,
    OfTree,
    Tools,
    Url,
    flag,
    id_of,
    named_tools,
    numbered,
    option,
    read_json,
    root_of,
    run_hooks,
)

IN_DOUBT_MAX = 1_000
REASONS = {
    "raised": "it raised an error, and may have acted before it did",
    "timed_out": "it timed out, and may have acted",
    "cancelled": "it was interrupted while it ran",
    "owner_died": "the process that ran it died before it reported the outcome",
    "rewound": "the session was rewound while it ran",
    None: "the process that runs it has stopped renewing its lease",
}
OUTCOMES = {
    "not_landed": "it did not happen; an identical call runs it",
    "abandoned": "it was given up and may be run again",
    "given_up": "it was given up permanently: identical calls get this failure",
    "verified": "its verify hook found that it had happened",
    "resolved": "a person confirmed that it had happened",
    "not_storable": "it happened, but its result could not be stored",
}
POLICIES = {"read": "reads", "write": "writes", "mutate": "not safe to repeat"}

app = Commands("Show what tools did, and resolve effects whose outcome is unknown.")

EffectId = Annotated[
    str,
    numbered(
        "EFFECT",
        "The effect's id, its number in the list, or the beginning of its id.",
        lambda store: store.effects(limit=OFFERED_MAX),
        "tool",
        "status",
    ),
]


@app.command("list", mode="read")
def list_effects(
    store: Store,
    session: OfSession = None,
    root: OfTree = None,
    tool: Annotated[str | None, option("NAME", "Only those of this tool.")] = None,
    status: Annotated[
        str | None,
        option("STATUS", "issued, completed, failed or unknown.", offers=EFFECT_STATUSES),
    ] = None,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List effects: those in doubt first, then all in the order of issue."""
    wanted = cast("EffectStatus | None", status)
    chosen: dict[str, Any] = {
        "session": id_of(store, session),
        "root": root_of(store, root),
        "tool": tool,
    }
    found = store.effects(**chosen, status=wanted, after=after, limit=limit)
    doubtful = [] if after else _doubtful(store, chosen, wanted)
    next_after = found[-1].number if len(found) == limit else None

    def shown() -> Iterator[Any]:
        named = {effect.id for effect in doubtful}
        others = [effect for effect in found if effect.id not in named]
        if doubtful:
            explain = "`holdfast effects show NUMBER` says what is known and what you can do"
            yield f"In doubt; {explain}:\n"
            yield _table(doubtful)
        if doubtful and others:
            yield "\nAll others:\n"
        if others or not doubtful:
            yield _table(others)
        if next_after is not None:
            yield f"\nThere may be more: --after {next_after}"

    lists = {"in_doubt": doubtful, "effects": found}
    data = {name: list(map(output.data, each)) for name, each in lists.items()}
    return Answer({**data, "next_after": next_after}, shown)


def _doubtful(store: Store, chosen: dict[str, Any], wanted: EffectStatus | None) -> list[Effect]:
    now_ms = store.now_ms()
    found = [
        effect
        for status in ("unknown", "issued")
        if wanted in {None, status}
        for effect in store.effects(**chosen, status=status, limit=IN_DOUBT_MAX)
        if _is_in_doubt(effect, now_ms)
    ]
    return sorted(found, key=lambda effect: effect.number)


def _is_in_doubt(effect: Effect, now_ms: int) -> bool:
    is_ownerless = effect.takeover_at is not None and effect.takeover_at <= now_ms
    return effect.status == "unknown" or (effect.status == "issued" and is_ownerless)


def _table(effects: Sequence[Effect]) -> Any:
    columns: output.Columns = {
        "number": "number",
        "id": "id",
        "tool": "tool",
        "session": "session_id",
        "status": "status",
        "reason": lambda each: "replayed" if each.replay_of else each.reason,
        "issued": "issued_at",
        "error": "error",
    }
    return output.table(effects, columns, drop=("id", "session"), empty="No effects.")


@app.command(mode="read")
def show(store: Store, effect: EffectId) -> Answer:
    """Show what was requested, what is known, and what you can do if it is in doubt."""
    found = store.find_effect(effect)
    attempts = store.attempts(found.id)
    in_doubt = _is_in_doubt(found, store.now_ms())

    def shown() -> Iterator[Any]:
        yield output.fields(_question(found))
        yield output.heading("Requested")
        yield output.json_lines(found.arguments)
        yield output.heading("Known")
        yield output.fields(_known(found, in_doubt=in_doubt))
        if found.status == "completed":
            yield output.heading("Result")
            yield output.json_lines(found.result)
        if found.late is not None:
            yield output.heading("Reported later, after its lease was lost; it changed nothing")
            yield output.json_lines(found.late)
            if found.late["status"] == "completed" and found.status in {"issued", "unknown"}:
                yield f"\nIts owner reported that it landed; confirm with:\n  {_landed(found)}"
        if len(attempts) > 1:
            yield output.heading("Attempts")
            columns = {name: name for name in ("number", "attempt", "status", "reason")}
            columns |= {"issued": "issued_at", "by": "holder", "error": "error"}
            yield output.table(attempts, columns, drop=("by",))
        if in_doubt:
            yield _choices(found)

    history = list(map(output.data, attempts))
    return Answer({**output.data(found), "is_in_doubt": in_doubt, "attempts": history}, shown)


def _question(effect: Effect) -> dict[str, Any]:
    what = POLICIES[effect.effect] + (", cannot be undone" if effect.is_irreversible else "")
    return {
        "effect": f"{effect.id} (number {effect.number})",
        "tool": f"{effect.tool} ({what})",
        "session": effect.session_id,
        "item": effect.item_id,
        "call_id": effect.call_id,
        "requested_at": iso(effect.issued_at),
        "requested_by": effect.holder,
        "idempotency_key": effect.idempotency_key,
        **({"replay_of": effect.replay_of} if effect.replay_of else {}),
        **({"undoes": effect.undoes} if effect.undoes else {}),
    }


def _known(effect: Effect, *, in_doubt: bool) -> dict[str, Any]:
    told = REASONS.get(effect.reason) if in_doubt else OUTCOMES.get(effect.reason or "")
    known: dict[str, Any] = {"status": effect.status + (f": {told}" if told else "")}
    if effect.status == "issued":
        known["takeover_possible_from"] = effect.takeover_at
    known["ended_at"] = effect.ended_at
    known |= {name: getattr(effect, name) for name in ("error", "decided_by", "note", "undone_by")}
    known["key_is_free_again_at"] = effect.expires_at
    return {
        name: iso(value) if isinstance(value, int) else value
        for name, value in known.items()
        if value is not None
    }


def _choices(effect: Effect) -> str:
    again = "If it did happen after all, it happens twice"
    if effect.effect == "write":
        again = "Repeating it has the same result"
    return (
        f"\nThe outcome of {effect.tool} is unknown; identical calls raise Unresolved. Ask the "
        f"receiver about the idempotency key {effect.idempotency_key}. Then choose:\n\n"
        "It happened. Identical calls get the result, and it is never run again:\n"
        f"  {_landed(effect)}\n\n"
        "It did not happen. The next identical call runs it, with the same idempotency key. "
        f"{again}:\n"
        f"  holdfast effects resolve {effect.number} --not-landed --by NAME\n\n"
        "Or let the tool's own verify hook find out:\n"
        f"  holdfast effects verify {effect.number} --tools MODULE:TOOL"
    )


def _landed(effect: Effect) -> str:
    return f"holdfast effects resolve {effect.number} --landed --result JSON --by NAME"


@app.command(mode="write")
def resolve(
    store: Store,
    effect: EffectId,
    landed: Annotated[bool, flag("--landed", "It happened.")] = False,
    not_landed: Annotated[bool, flag("--not-landed", "It did not happen.")] = False,
    result: Annotated[
        str | None, option("JSON", "The result that identical calls get; null by default.")
    ] = None,
    by: Annotated[str | None, option("NAME", "Who decides; required, and recorded.")] = None,
    note: Annotated[str | None, option("TEXT", "Why (recorded).")] = None,
) -> Answer:
    """Record whether an effect in doubt happened. Check with its receiver first."""
    if landed == not_landed:
        raise InvalidArgument("pass either --landed or --not-landed")
    if by is None:
        raise InvalidArgument("--by NAME is required: who decides")
    if result is not None and not landed:
        raise InvalidArgument(
            "--result needs --landed: an effect that did not happen has no result"
        )
    verdict: Landed | NotLanded = NotLanded()
    if landed:
        verdict = Landed(None if result is None else read_json(result, "--result"))
    return _settled(store.resolve(store.find_effect(effect).id, verdict, by=by, note=note))


@app.command(mode="write")
def verify(
    store: Store,
    effect: EffectId,
    tools: Tools = None,
    url: Url = None,
    namespace: Namespace = None,
) -> Answer:
    """Call the tool's verify hook on an effect in doubt, and record what it finds.

    The exit code is 4 if it cannot determine the outcome.
    """
    known = named_tools(tools)
    if not known:
        raise InvalidArgument("--tools MODULE:TOOL is required: the tool whose hook is asked")
    id, hooks = store.find_effect(effect).id, [tool.verify for tool in known]
    return _settled(run_hooks(store, url, namespace, hooks, lambda at: at.verify(id, known)))


def _settled(effect: Effect) -> Answer:
    texts = {
        "completed": "happened (effect {}): identical calls get its result.",
        "failed": "did not happen (effect {}): the next identical call runs it.",
    }
    text = texts.get(effect.status, "is still in doubt (effect {}); nothing was changed.")
    code = 0 if effect.status in texts else Unresolved.exit_code
    return Answer(output.data(effect), f"{effect.tool} {text.format(effect.id)}", code)
