"""Sessions that are deleted while an effect of theirs is in doubt."""

from __future__ import annotations

from typing import Any

import holdfast
from holdfast import NotLanded, SessionNotFound
from holdfast.testing.subject import Subject, done, raises
from tests.checkpoints.colours import both_colours
from tests.effects.world import World, abandoned


@both_colours
async def test_a_session_that_is_deleted_while_its_effect_is_verified(subject: Subject) -> None:
    world = World()

    def verify(arguments: dict[str, Any], idempotency_key: str) -> NotLanded:
        with holdfast.open(**subject.place) as other:
            other.find_session("s").delete(force=True)
        return NotLanded()

    mail = world.tool(verify=verify)
    store, session = await abandoned(subject, mail, to="ann")
    await raises(SessionNotFound, lambda: session.call(mail, to="ann"))
    (effect,) = await done(store.effects())
    assert (effect.status, effect.reason, effect.arguments) == ("failed", "not_landed", None)
    assert world.done == []


@both_colours
async def test_what_a_deleted_session_left_in_doubt_is_run_by_its_successor(
    subject: Subject,
) -> None:
    world = World()
    world.verdict = NotLanded()
    mail = world.tool(verify=world.verify)
    store, session = await abandoned(subject, mail, to="ann")
    await done(session.delete(force=True))
    session = await done(store.session("s"))
    result = await done(session.call(mail, to="ann"))
    assert (result.value, result.replayed) == (1, False)
    assert (world.done, len(world.asked)) == ([("ann", "")], 1)
    effects = await done(store.effects())
    assert [(effect.attempt, effect.status, effect.arguments) for effect in effects] == [
        (1, "failed", None),
        (2, "completed", None),
        (2, "completed", {"to": "ann"}),
    ]
    # What is left of the deleted session, and the answer that the new one has of its own.
    assert [effect.unlinked_at is None for effect in effects] == [False, False, True]
    assert effects[2].replay_of == effects[1].id
