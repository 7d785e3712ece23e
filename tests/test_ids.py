"""Ids that callers choose: whatever has one can be opened over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.mesh import Mesh
from holdfast.testing.subject import Subject, done
from tests.conftest import InColour
from tests.state.test_moving import frames, write

REFUSED = "must not be '.*', which cannot be part of a URL"


@pytest.mark.parametrize("id", [".", ".."])
def test_ids_that_are_steps_of_a_path_are_refused_where_they_are_chosen(
    in_colour: InColour, id: str
) -> None:
    """However they are escaped, a client resolves them before it sends its request."""

    async def main(subject: Subject) -> None:
        store = await subject.open()
        session = await done(store.session("s"))
        await done(session.append("t", [1]))
        choices: list[Callable[[], Any]] = [
            lambda: store.session(id),
            lambda: session.fork(1, id=id),
            lambda: session.ask("peer", id=id),
            lambda: session.spend("model", id=id),
            lambda: store.work.submit("step", id=id),
            lambda: Mesh(store).request("peer", request_id=id),
        ]
        for choose in choices:
            with pytest.raises(holdfast.InvalidArgument, match=REFUSED):
                await done(choose())
        assert [each.id for each in await done(store.sessions())] == ["s"]
        assert await done(store.asks()) == []
        assert await done(store.work.list()) == []
        # Other names with dots are names.
        named = await done(store.session("..."))
        assert named.id == "..."

    in_colour(main)


@pytest.mark.parametrize(("tag", "field"), [("tree", "root_id"), ("session", "id")])
def test_a_file_with_such_an_id_is_not_imported(tmp_path: Path, tag: str, field: str) -> None:
    file = tmp_path / "sessions.export"
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as store:
        store.session("s")
        store.export(file)
    changed = [
        msgspec.structs.replace(each, **{field: ".."})
        if each.__struct_config__.tag == tag
        else each
        for each in frames(file)
    ]
    write(file, changed)
    with holdfast.open(f"sqlite:///{tmp_path}/other.db") as store:
        with pytest.raises(holdfast.HoldfastError, match=REFUSED):
            store.import_sessions(file)
        assert store.sessions() == []
