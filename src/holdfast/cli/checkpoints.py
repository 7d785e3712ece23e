"""`holdfast checkpoints`: look at versions, compare them, and go on from one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import typer

from ..checkpoints.diff import printable
from ..clock import iso
from ..effects import Rewound
from ..errors import NotFound
from ..records import KINDS, Effect, Kind
from ..session import Session
from ..store import Store
from . import output
from .command import (
    Answer,
    Commands,
    Limit,
    Namespace,
    SessionId,
    Tools,
    Url,
    Version,
    Yes,
    argument,
    confirm,
    flag,
    named_tools,
    option,
    page,
    run_hooks,
)

app = Commands("Show checkpoints, compare them, fork or rewind to one.")
STYLES = {"+": "green", "-": "red", "~": "yellow", " ": "dim"}


@app.command("list", mode="read")
def list_checkpoints(
    store: Store,
    session: SessionId,
    kind: Annotated[str | None, option("KIND", "Only those of this kind.", offers=KINDS)] = None,
    before: Annotated[int | None, option("VERSION", "Only versions below this one.")] = None,
    after: Annotated[int, option("VERSION", "Only versions above this one.")] = 0,
    oldest_first: Annotated[bool, flag("--oldest-first", "List the oldest first.")] = False,
    limit: Limit = 100,
) -> Answer:
    """List a session's checkpoints, newest first by default."""
    found = store.find_session(session).history(
        kind=cast("Kind | None", kind),
        before=before,
        after=after,
        limit=limit,
        oldest_first=oldest_first,
    )
    columns = {name: name for name in ("version", "epoch", "kind")}
    columns |= {"created": "created_at", "data": "data"}
    return page(
        "checkpoints", found, output.data, columns, limit=limit, position="version",
        more="after" if oldest_first else "before", drop=("epoch",), empty="No checkpoints.",
    )  # fmt: skip


@app.command(mode="read")
def show(
    store: Store,
    session: SessionId,
    version: Annotated[int | None, argument("[VERSION]", "Without one, the latest.")] = None,
    last: Annotated[int | None, option("N", "Show only the last N items of each list.")] = None,
) -> Answer:
    """Show one checkpoint with its channels."""
    found = store.find_session(session)
    loaded = found.latest(last=last) if version is None else found.at(version, last=last)
    if loaded is None:
        raise NotFound(f"session {found.id} has no checkpoint yet", id=found.id)
    data = output.data(loaded)

    def shown() -> Iterator[Any]:
        yield output.known({k: v for k, v in data.items() if k not in {"channels", "left_out"}})
        for name, value in loaded.channels.items():
            hidden = loaded.left_out.get(name)
            yield output.heading(f"{name} (without its first {hidden})" if hidden else name)
            yield output.json_lines(value)

    return Answer(data, shown)


@app.command(mode="read")
def diff(
    store: Store,
    session: SessionId,
    before: Annotated[int, argument("BEFORE", "The version to compare.")],
    after: Annotated[int, argument("AFTER", "The version to compare with.")],
) -> Answer:
    """Compare the channels of two checkpoints."""
    found = store.find_session(session).diff(before, after)

    def shown() -> Iterator[Any]:
        from rich.text import Text

        if not found.channels:
            yield f"Versions {before} and {after} have the same channels."
        for line in found.lines():
            yield Text(line, style=STYLES.get(line[0], "bold"))

    return Answer({"before": before, "after": after, **found.to_dict()}, shown)


@app.command(mode="write")
def fork(
    store: Store,
    session: SessionId,
    version: Version,
    id: Annotated[str | None, option("ID", "The id of the new session.")] = None,
    name: Annotated[str | None, option("NAME", "The name of the new session.")] = None,
) -> Answer:
    """Start a session that shares the history up to a checkpoint."""
    origin = store.find_session(session)
    forked = origin.fork(version, id=id, name=name)
    return Answer(
        {"session_id": forked.id, "origin": origin.id, "version": version},
        f"Session {forked.id} continues from version {version} of {origin.id}.",
    )


@app.command(mode="write")
def rewind(
    store: Store,
    session: SessionId,
    version: Version,
    tools: Tools = None,
    reopen: Annotated[bool, flag("--reopen", "Reopen the session if it has ended.")] = False,
    yes: Yes = False,
    url: Url = None,
    namespace: Namespace = None,
) -> Answer:
    """Rewind a session to an older checkpoint. Later checkpoints are kept, off its path.

    Effects since then are undone with the named tools; the others are kept, and can be undone
    later by a rewind to the same version with their tools.
    """
    known = named_tools(tools)
    found = store.find_session(session)
    if not yes:
        lasting = [
            (effect, f"at {iso(effect.issued_at)}")
            for effect in found.standing(version)
            if effect.is_irreversible and effect.status == "completed"
        ]
        told = _listed(f"Done since version {version}, and cannot be undone", lasting)
        typer.echo(told, err=True, nl=bool(told))
    confirm(f"Rewind session {found.id} to version {version}?", yes=yes)
    if reopen:
        found.at(version, last=1)  # A version that does not exist must not reopen it.
        found = store.session(found.id, reopen=True)
    place, hooks = (found.id, found.number, found.root_id), [tool.undo for tool in known]
    written = run_hooks(
        store, url, namespace, hooks,
        lambda at: Session(at.runtime, *place).rewind(version, tools=known),
    )  # fmt: skip

    def shown() -> Iterator[str]:
        yield (
            f"Session {found.id} continues from version {version}, in epoch {written.epoch}; "
            f"its newest version is {written.version}."
        )
        doubt = "it was running; `holdfast effects show` says what to do"
        groups = {
            "Undone": [(effect, "") for effect in written.undone],
            "Not undone; identical calls get their results": [
                *((effect, "it cannot be undone") for effect in written.irreversible),
                *written.not_undone,
            ],
            "In doubt": [(effect, doubt) for effect in written.in_flight],
            "Given up; identical calls get their failure": [
                (effect, "its outcome is unknown") for effect in written.given_up
            ],
        }
        yield from (_listed(name, effects) for name, effects in groups.items() if effects)

    return Answer(_rewound_data(written), shown)


def _listed(heading: str, effects: Sequence[tuple[Effect, str]]) -> str:
    lines = [
        f"  {effect.number} {printable(f'{effect.tool}: {why}' if why else effect.tool)}"
        for effect, why in effects
    ]
    return "\n".join([f"{heading}:", *lines]) if lines else ""


def _rewound_data(rewound: Rewound) -> dict[str, Any]:
    fields = output.data(rewound)
    for name in ("undone", "irreversible", "in_flight", "given_up"):
        fields[name] = list(map(output.data, getattr(rewound, name)))
    fields["not_undone"] = [
        output.data(effect) | {"why": why} for effect, why in rewound.not_undone
    ]
    return fields


@app.command(mode="write")
def pin(
    store: Store,
    session: SessionId,
    version: Version,
    reason: Annotated[str, option("TEXT", "Why to keep it.")],
) -> Answer:
    """Keep a checkpoint from being pruned."""
    found = store.find_session(session)
    found.pin(version, reason)
    return Answer(
        {"session_id": found.id, "version": version, "reason": reason},
        f"Version {version} of session {found.id} is pinned.",
    )


@app.command(mode="write")
def unpin(store: Store, session: SessionId, version: Version) -> Answer:
    """Let a checkpoint be pruned again."""
    found = store.find_session(session)
    found.unpin(version)
    return Answer(
        {"session_id": found.id, "version": version},
        f"Version {version} of session {found.id} is not pinned.",
    )
