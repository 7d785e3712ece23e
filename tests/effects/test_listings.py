"""Effects by tree: those of its root and of all sessions below it, while they exist."""

from __future__ import annotations

from typing import Any

from holdfast import Unresolved
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World


def receivers(effects: list[Any]) -> list[str]:
    return [effect.arguments["to"] for effect in effects]


@both_colours
async def test_effects_of_a_tree_are_those_of_all_its_sessions_in_their_order(
    subject: Subject,
) -> None:
    world, store = World(), await subject.open()
    mail, post = world.tool(), world.tool(name="post")
    root = await done(store.session("root"))
    child = await done(store.session("child", parent="root"))
    below = await done(store.session("below", parent="child"))
    other = await done(store.session("other"))
    for number, session in enumerate((below, root, other, child, root, below)):
        await done(session.call(post if number % 2 else mail, to=str(number)))
    await done(child.save(step=1))
    await done(root.save(step=1))
    copy, twin = await done(child.fork(1)), await done(root.fork(1))
    await done(copy.call(mail, to="copied"))
    await done(twin.call(mail, to="elsewhere"))
    world.fails_with = ConnectionError()
    await raises(Unresolved, lambda: child.call(mail, to="nobody"))
    everything = ["0", "1", "3", "4", "5", "copied", "nobody"]
    for tree in (root, child, below, copy, "root"):
        assert receivers(await done(store.effects(root=tree))) == everything
    first = await done(store.effects(root=root, limit=3))
    rest = await done(store.effects(root=root, after=first[-1].number))
    assert receivers(first + rest) == everything
    for given, expected in (
        ({"tool": "post"}, ["1", "3", "5"]),
        ({"status": "unknown"}, ["nobody"]),
        ({"status": "issued"}, []),
        ({"status": "completed", "tool": "mail"}, ["0", "4", "copied"]),
        ({"session": child}, ["3", "nobody"]),
        ({"session": root, "tool": "mail"}, ["4"]),
        ({"session": other}, []),
    ):
        assert receivers(await done(store.effects(root=root, **given))) == expected
    # A tree has the id of its root only.
    assert await done(store.effects(root="child")) == []
    assert await done(store.effects(root="nothing")) == []


@both_colours
async def test_effects_of_deleted_sessions_are_not_those_of_a_later_tree(subject: Subject) -> None:
    world, store = World(), await subject.open()
    mail = world.tool()
    root = await done(store.session("root"))
    children = [await done(store.session(f"child {n}", parent="root")) for n in range(2)]
    for session in (root, *children):
        await done(session.call(mail, to=session.id))
    await done(children[0].delete(force=True))
    assert receivers(await done(store.effects(root=root))) == ["root", "child 1"]
    await done(root.delete(force=True))
    assert await done(store.effects(root="root")) == []
    root = await done(store.session("root"))
    child = await done(store.session("child 1", parent="root"))
    assert await done(store.effects(root=root)) == []
    # A late retry finds them.
    assert len(await done(store.effects(session=child))) == 1
    await done(child.call(mail, to="anew"))
    assert receivers(await done(store.effects(root=root))) == ["anew"]
