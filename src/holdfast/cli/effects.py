"""`holdfast effects`: look at what tools did, and settle what nobody is certain of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from .. import store
from ..clock import iso
from ..codec import from_json
from ..effects import Landed, NotLanded
from ..errors import InvalidArgument, Unresolved
from ..records import EFFECT_STATUSES, Effect, EffectStatus
from .completion import effect_ids, one_of
from .groups import group
from .options import AsJson, Limit, Namespace, OfSession, Tools, Url, named_tools
from .output import console, print_json, with_place
from .showing import effect_data, say, show_fields, show_json, show_table, when

IN_DOUBT_MAX = 1_000
REASONS = {
    "raised": "it raised an error, and may have acted before it did",
    "timed_out": "it took too long, and may have acted",
    "cancelled": "it was interrupted while it ran",
    "owner_died": "the process that ran it died before it told the outcome",
    "rewound": "the session was rewound while it ran",
    None: "the process that runs it has stopped renewing its lease",
}
OUTCOMES = {
    "not_landed": "it did not happen; an equal call runs it",
    "abandoned": "it was given up and may be run again",
    "given_up": "it was given up for good: equal calls get this failure",
    "verified": "its verify hook found that it had happened",
    "resolved": "a person said that it had happened",
    "not_storable": "it happened, but its result could not be stored",
}

app = group("Look at what tools did, and settle what nobody is certain of.")

EffectId = Annotated[
    str,
    typer.Argument(
        metavar="EFFECT",
        help="The effect's id, its number in the list, or the beginning of its id.",
        autocompletion=effect_ids,
    ),
]


@app.command("list")
def list_effects(
    url: Url = None,
    namespace: Namespace = None,
    session: OfSession = None,
    tool: Annotated[
        str | None, typer.Option("--tool", metavar="NAME", help="Only those of a tool.")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            metavar="STATUS",
            help="issued, completed, failed or unknown.",
            autocompletion=one_of(EFFECT_STATUSES),
        ),
    ] = None,
    after: Annotated[
        int, typer.Option("--after", metavar="NUMBER", help="Continue after this number.")
    ] = 0,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List effects: what is in doubt first, then all in the order of issue."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        session_id = None if session is None else opened.find_session(session).id
        wanted = cast("EffectStatus | None", status)
        chosen: dict[str, Any] = {"session": session_id, "tool": tool}
        found = opened.effects(**chosen, status=wanted, after=after, limit=limit)
        doubtful = [] if after else _doubtful(opened, chosen)
    if wanted is not None:
        doubtful = [effect for effect in doubtful if effect.status == wanted]
    next_after = found[-1].number if len(found) == limit else None
    if as_json:
        lists = {"in_doubt": doubtful, "effects": found}
        print_json(
            {name: list(map(effect_data, each)) for name, each in lists.items()}
            | {"next_after": next_after}
        )
        return
    shown = {effect.id for effect in doubtful}
    others = [effect for effect in found if effect.id not in shown]
    if doubtful:
        told = "`holdfast effects show NUMBER` says what is known and what each choice means"
        say(with_place(f"In doubt; {told}:\n", url, namespace))
        _show_lines(doubtful)
    if doubtful and others:
        say("\nAll others:\n")
    if others or not doubtful:
        _show_lines(others)
    if next_after is not None:
        say(f"\nThere may be more: --after {next_after}")


def _doubtful(opened: store.Store, chosen: dict[str, Any]) -> list[Effect]:
    """Return what is unknown, and what is issued to an owner whose lease is over."""
    now_ms = opened.now_ms()
    found = opened.effects(**chosen, status="unknown", limit=IN_DOUBT_MAX)
    found += opened.effects(**chosen, status="issued", limit=IN_DOUBT_MAX)
    doubtful = (effect for effect in found if _is_in_doubt(effect, now_ms))
    return sorted(doubtful, key=lambda effect: effect.number)


def _is_in_doubt(effect: Effect, now_ms: int) -> bool:
    is_ownerless = effect.takeover_at is not None and effect.takeover_at <= now_ms
    return effect.status == "unknown" or (effect.status == "issued" and is_ownerless)


def _show_lines(effects: Sequence[Effect]) -> None:
    headings = ("number", "id", "tool", "session", "status", "reason", "issued", "error")
    lines = (
        (
            each.number, each.id, each.tool, each.session_id, each.status,
            "replayed" if each.replay_of else each.reason, when(each.issued_at), each.error,
        )
        for each in effects
    )  # fmt: skip
    show_table(headings, lines, drop=("id", "session"), empty="No effects.")


@app.command()
def show(
    effect: EffectId, url: Url = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """Show what was asked, what is known of it, and what each choice about it means."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        found = opened.find_effect(effect)
        attempts = opened.attempts(found.id)
        in_doubt = _is_in_doubt(found, opened.now_ms())
    if as_json:
        history = list(map(effect_data, attempts))
        print_json({**effect_data(found), "is_in_doubt": in_doubt, "attempts": history})
        return
    _show_question(found)
    _show_answer(found, in_doubt=in_doubt)
    if len(attempts) > 1:
        _heading("Attempts")
        headings = ("number", "attempt", "status", "reason", "issued", "by", "error")
        lines = (
            (
                each.number, each.attempt, each.status, each.reason, when(each.issued_at),
                each.holder, each.error,
            )
            for each in attempts
        )  # fmt: skip
        show_table(headings, lines, drop=("by",))
    if in_doubt:
        say(with_place(_choices(found), url, namespace))


def _show_question(effect: Effect) -> None:
    words = {"read": "reads", "write": "writes", "mutate": "not safe to repeat"}
    what = words[effect.effect]
    if effect.is_irreversible:
        what += ", cannot be undone"
    show_fields(
        {
            "effect": f"{effect.id} (number {effect.number})",
            "tool": f"{effect.tool} ({what})",
            "session": effect.session_id,
            "item": effect.item_id,
            "call_id": effect.call_id,
            "asked_at": iso(effect.issued_at),
            "asked_by": effect.holder,
            "idempotency_key": effect.idempotency_key,
            **({"replay_of": effect.replay_of} if effect.replay_of else {}),
            **({"undoes": effect.undoes} if effect.undoes else {}),
        }
    )
    _heading("Asked for")
    show_json(effect.arguments)


def _show_answer(effect: Effect, *, in_doubt: bool) -> None:
    _heading("Known")
    told = OUTCOMES.get(effect.reason or "")
    if in_doubt:
        told = REASONS.get(effect.reason, effect.reason)
    fields: dict[str, Any] = {"status": f"{effect.status}{': ' + told if told else ''}"}
    if effect.status == "issued":
        assert effect.takeover_at is not None
        fields["takeover_possible_from"] = iso(effect.takeover_at)
    if effect.ended_at is not None:
        fields["ended_at"] = iso(effect.ended_at)
    for name in ("error", "decided_by", "note", "undone_by"):
        if getattr(effect, name) is not None:
            fields[name] = getattr(effect, name)
    if effect.expires_at is not None:
        fields["key_is_free_again_at"] = iso(effect.expires_at)
    show_fields(fields)
    if effect.status == "completed":
        _heading("Result")
        show_json(effect.result)
    if effect.late is not None:
        _heading("Reported later, by an owner that had lost it; it changed nothing")
        show_json(effect.late)


def _choices(effect: Effect) -> str:
    again = "It is done twice if it had happened after all"
    if effect.effect == "write":
        again = "Repeating it leaves the same result"
    return (
        f"\nThe outcome of {effect.tool} is unknown; identical calls raise Unresolved. Look at the "
        f"receiver for the idempotency key {effect.idempotency_key}. Then choose:\n\n"
        "It happened. Equal calls get the result, and it is never run again:\n"
        f"  holdfast effects resolve {effect.number} --landed --result JSON --by NAME\n\n"
        "It did not happen. The next equal call runs it, with the same idempotency key. "
        f"{again}:\n"
        f"  holdfast effects resolve {effect.number} --not-landed --by NAME\n\n"
        "Or let the tool's own verify hook find out:\n"
        f"  holdfast effects verify {effect.number} --tools MODULE:TOOL"
    )


def _heading(text: str) -> None:
    console().print(f"\n{text}:", style="bold", markup=False)


@app.command()
def resolve(
    effect: EffectId,
    url: Url = None,
    namespace: Namespace = None,
    landed: Annotated[bool, typer.Option("--landed", help="It happened.")] = False,
    not_landed: Annotated[bool, typer.Option("--not-landed", help="It did not happen.")] = False,
    result: Annotated[
        str | None,
        typer.Option("--result", metavar="JSON", help="What equal calls get; null if left out."),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="Who decides; it is recorded.")
    ] = None,
    note: Annotated[
        str | None, typer.Option("--note", metavar="TEXT", help="Why; it is recorded too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether an effect in doubt happened. Look at its receiver first."""
    if landed == not_landed:
        raise InvalidArgument("say what happened: either --landed or --not-landed")
    if by is None:
        raise InvalidArgument("say who decides: --by NAME")
    if result is not None and not landed:
        raise InvalidArgument("what did not happen has no result; leave --result out")
    verdict: Landed | NotLanded = NotLanded()
    if landed:
        verdict = Landed(None if result is None else from_json(result, name="--result"))
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_effect(effect)
        settled = opened.resolve(found.id, verdict, by=by, note=note)
    _tell(settled, as_json=as_json)


@app.command()
def verify(
    effect: EffectId,
    tools: Tools = None,
    url: Url = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Ask the tool's own verify hook whether an effect in doubt happened, and record its answer.

    The exit code is 4 if it cannot tell.
    """
    known = named_tools(tools)
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_effect(effect)
        settled = opened.verify(found.id, known)
    _tell(settled, as_json=as_json)
    if settled.status in {"issued", "unknown"}:
        raise typer.Exit(Unresolved.exit_code)


def _tell(effect: Effect, *, as_json: bool) -> None:
    if as_json:
        print_json(effect_data(effect))
        return
    match effect.status:
        case "completed":
            say(f"{effect.tool} happened (effect {effect.id}): equal calls get its result.")
        case "failed":
            say(f"{effect.tool} did not happen (effect {effect.id}): the next equal call runs it.")
        case _:
            say(f"{effect.tool} is still in doubt (effect {effect.id}); nothing was changed.")
