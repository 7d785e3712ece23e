"""`holdfast checkpoints`: look at versions, compare them, and go on from one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from .. import store
from ..checkpoints.diff import printable
from ..clock import iso
from ..effects import Rewound
from ..errors import NotFound
from ..records import KINDS, Effect, Kind
from .completion import one_of
from .groups import confirm, group
from .moving import export_sessions, import_export
from .options import AsJson, Limit, Namespace, SessionId, Tools, Url, Version, Yes, named_tools
from .output import console, print_json, with_place
from .showing import checkpoint_data, effect_data, say, show_fields, show_json, show_table, when

app = group("Look at checkpoints, compare them, fork or rewind to one.")
app.command("export")(export_sessions)
app.command("import")(import_export)


@app.command("list")
def list_checkpoints(
    session: SessionId,
    url: Url = None,
    namespace: Namespace = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Only those of a kind.",
            autocompletion=one_of(KINDS),
        ),
    ] = None,
    before: Annotated[
        int | None, typer.Option("--before", metavar="VERSION", help="Continue below this version.")
    ] = None,
    after: Annotated[
        int, typer.Option("--after", metavar="VERSION", help="Continue above this version.")
    ] = 0,
    oldest_first: Annotated[
        bool, typer.Option("--oldest-first", help="Begin with the oldest.")
    ] = False,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List a session's checkpoints, the newest first unless told otherwise."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        wanted = cast("Kind | None", kind)
        found = opened.find_session(session).history(
            kind=wanted, before=before, after=after, limit=limit, oldest_first=oldest_first
        )
    last = found[-1].version if len(found) == limit else None
    way = "after" if oldest_first else "before"
    if as_json:
        print_json({"checkpoints": list(map(checkpoint_data, found)), f"next_{way}": last})
        return
    headings = ("version", "epoch", "kind", "created", "data")
    lines = (
        (each.version, each.epoch, each.kind, when(each.created_at), each.data) for each in found
    )
    show_table(headings, lines, drop=("epoch",), empty="No checkpoints.")
    if last is not None and (oldest_first or last > 1):
        say(f"\nThere may be more: --{way} {last}")


@app.command()
def show(
    session: SessionId,
    version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="Without one, the latest.")
    ] = None,
    url: Url = None,
    namespace: Namespace = None,
    last: Annotated[
        int | None, typer.Option("--last", metavar="N", help="Only the last items of each list.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint with its channels."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        found = opened.find_session(session)
        loaded = found.latest(last=last) if version is None else found.at(version, last=last)
    if loaded is None:
        raise NotFound(f"session {found.id} has no checkpoint yet", id=found.id)
    fields = checkpoint_data(loaded)
    if as_json:
        print_json(fields)
        return
    channels: dict[str, Any] = fields.pop("channels")
    left_out: dict[str, int] = fields.pop("left_out")
    show_fields(fields)
    out = console()
    for name, value in channels.items():
        hidden = f" (without its first {left_out[name]})" if name in left_out else ""
        out.print(f"\n{name}{hidden}:", style="bold", markup=False)
        show_json(value)


@app.command()
def diff(
    session: SessionId,
    before: Annotated[int, typer.Argument(metavar="BEFORE", help="The version to compare.")],
    after: Annotated[int, typer.Argument(metavar="AFTER", help="The version to compare with.")],
    url: Url = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Compare the channels of two checkpoints."""
    with store.open(url, namespace=namespace, mode="read") as opened:
        found = opened.find_session(session).diff(before, after)
    if as_json:
        print_json({"before": before, "after": after, **found.to_dict()})
        return
    if not found.channels:
        say(f"Versions {before} and {after} have the same channels.")
    styles = {"+": "green", "-": "red", "~": "yellow", " ": "dim"}
    out = console()
    for line in found.lines():
        out.print(line, style=styles.get(line[0], "bold"), markup=False)


@app.command()
def fork(
    session: SessionId,
    version: Version,
    url: Url = None,
    namespace: Namespace = None,
    id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The id of the new session.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The name of the new session.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a session that shares the history up to a checkpoint."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        origin = opened.find_session(session)
        forked = origin.fork(version, id=id, name=name)
    if as_json:
        print_json({"session_id": forked.id, "origin": origin.id, "version": version})
    else:
        say(f"Session {forked.id} continues from version {version} of {origin.id}.")


@app.command()
def rewind(
    session: SessionId,
    version: Version,
    tools: Tools = None,
    reopen: Annotated[
        bool, typer.Option("--reopen", help="Also if the session has ended: it is active again.")
    ] = False,
    url: Url = None,
    namespace: Namespace = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Rewind a session to an older checkpoint. Later checkpoints are kept, off its path.

    Effects since then are undone with the tools that are named; the others stand, and can be
    undone later by a rewind to the same version with their tools.
    """
    known = named_tools(tools)
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_session(session)
        if not yes:
            lasting = [e for e in found.standing(version) if e.is_irreversible]
            _show_effects(
                f"Done since version {version}, and cannot be undone",
                [(e, f"at {iso(e.issued_at)}") for e in lasting if e.status == "completed"],
                err=True,
            )
        confirm(f"Rewind session {found.id} to version {version}?", yes=yes)
        if reopen:
            found.at(version, last=1)  # A version that does not exist must not reopen it.
            found = opened.session(found.id, reopen=True)
        written = found.rewind(version, tools=known)
    if as_json:
        print_json(_rewound_data(written))
        return
    say(
        f"Session {found.id} continues from version {version}, in epoch {written.epoch}; "
        f"its newest version is {written.version}."
    )
    _show_effects("Undone", [(effect, "") for effect in written.undone])
    cannot = [(effect, "it cannot be undone") for effect in written.irreversible]
    _show_effects("Not undone; equal calls get their results", [*cannot, *written.not_undone])
    doubt = with_place("it was under way; `holdfast effects show` says what to do", url, namespace)
    _show_effects("In doubt", [(effect, doubt) for effect in written.in_flight])
    _show_effects(
        "Given up; equal calls get their failure",
        [(effect, "nobody knows whether it happened") for effect in written.given_up],
    )


def _show_effects(
    heading: str, effects: Sequence[tuple[Effect, str]], *, err: bool = False
) -> None:
    if effects:
        typer.echo(f"{heading}:", err=err)
    for effect, why in effects:
        about = f"{effect.tool}: {why}" if why else effect.tool
        typer.echo(f"  {effect.number} {printable(about)}", err=err)


def _rewound_data(rewound: Rewound) -> dict[str, Any]:
    fields = checkpoint_data(rewound)
    for name in ("undone", "irreversible", "in_flight", "given_up"):
        fields[name] = list(map(effect_data, getattr(rewound, name)))
    fields["not_undone"] = [
        {**effect_data(effect), "why": why} for effect, why in rewound.not_undone
    ]
    return fields


@app.command()
def pin(
    session: SessionId,
    version: Version,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why it is kept.")],
    url: Url = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Keep a checkpoint from being pruned."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_session(session)
        found.pin(version, reason)
    if as_json:
        print_json({"session_id": found.id, "version": version, "reason": reason})
    else:
        say(f"Version {version} of session {found.id} is pinned.")


@app.command()
def unpin(
    session: SessionId,
    version: Version,
    url: Url = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Let a checkpoint be pruned again."""
    with store.open(url, namespace=namespace, migrate=False) as opened:
        found = opened.find_session(session)
        found.unpin(version)
    if as_json:
        print_json({"session_id": found.id, "version": version})
    else:
        say(f"Version {version} of session {found.id} is not pinned.")
