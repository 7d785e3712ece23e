"""Followers get every committed change once and in order, whoever writes and however they wait."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

import holdfast
from holdfast.feed import follow
from tests.mesh.meshes import until

WRITER = """
import json, sys, holdfast
with holdfast.open(**json.loads(sys.argv[1])) as store:
    state = store.find_session("root").state
    for _ in range(10_000):
        print(state.increment("n").sequence, flush=True)
"""


def take(events: Any, count: int) -> list[Any]:
    return list(itertools.islice(events, count))


def test_a_follower_gets_what_was_and_what_comes(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store, holdfast.open(**place) as other:
        root = store.session("root")
        root.append("log", [1])
        events = store.follow(root)
        assert [event.kind for event in take(events, 2)] == ["session_created", "checkpoint_saved"]
        other.session("child", parent="root").state.set("k", 1)
        found = take(events, 2)
        assert [event.kind for event in found] == ["session_created", "state_changed"]
        again = store.follow("root", after=found[0].position)
        assert take(again, 1) == found[1:]
        watched = root.state.watch()
        assert take(watched, 1)[0].key == "k"
        other.find_session("root").state.delete("k")
        assert take(watched, 1)[0].operation == "delete"


def test_many_followers_at_different_places_each_get_all(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that begin behind what the process remembers."""
    monkeypatch.setattr(follow, "PAGES_REMEMBERED", 2)
    monkeypatch.setattr(follow, "EVENTS_PER_READ", 7)
    total = 120
    with holdfast.open(**place) as store:
        root = store.session("root")
        for number in range(50):
            root.state.increment("n", number)
        found: dict[int, list[int]] = {}

        def read(start: int) -> None:
            events = store.follow("root", after=start)
            found[start] = [event.position for event in take(events, total - start)]

        starts = [0, 10, 45, 50, 51]
        threads = [threading.Thread(target=read, args=(start,), daemon=True) for start in starts]
        for thread in threads:
            thread.start()
        with holdfast.open(**place) as other:
            state = other.find_session("root").state
            for number in range(total - 51):
                state.increment("n", number)
        for thread in threads:
            thread.join(120)
        assert found == {start: list(range(start + 1, total + 1)) for start in starts}


def test_writers_killed_at_random_leave_no_hole_and_no_ghost(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        store.session("root")

        watched = store.find_session("root").state.watch()
        seen = 0
        for _ in range(3):
            command = [sys.executable, "-c", WRITER, json.dumps(place)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            for event in watched:
                assert event.sequence == seen + 1
                seen = event.sequence
                if seen % 20 == 0:
                    break
            child.kill()
            told, _ = child.communicate()
            assert child.returncode == -signal.SIGKILL
            last = max((int(line) for line in told.splitlines()[:-1]), default=0)
            while seen < last:
                event = next(watched)
                assert event.sequence == seen + 1
                seen = event.sequence
        state = store.find_session("root").state
        # The server may still run the last statement of a process that was killed.
        until(lambda: state.get("n") == state.version(), "the number is not that of its changes")
        assert [each.sequence for each in take(state.watch(), state.version())] == list(
            range(1, state.version() + 1)
        )


def test_followers_in_an_event_loop(place: dict[str, Any]) -> None:
    async def main() -> None:
        async with holdfast.aopen(**place) as store:
            root = await store.session("root")

            async def read(count: int) -> list[int]:
                found: list[int] = []
                async for event in store.follow(root):
                    found.append(event.position)
                    if len(found) == count:
                        return found
                return found

            readers = [asyncio.create_task(read(11)) for _ in range(20)]
            for number in range(10):
                await root.state.set("k", number)
            assert await asyncio.gather(*readers) == [list(range(1, 12))] * 20
            waiting = asyncio.create_task(read(100))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


def test_what_cannot_be_followed_is_refused(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        state = store.session("root").state
        for number in range(5):
            state.set("k", number)
        state.compact(3)
        with pytest.raises(holdfast.Compacted):
            next(state.watch(after=1))
        assert next(state.watch(after=3)).sequence == 4
        for arguments in ({"after": -1}, {"poll_seconds": 0}, {"poll_seconds": "1"}):
            with pytest.raises(holdfast.InvalidArgument):
                next(store.follow("root", **arguments))
        with pytest.raises(holdfast.InvalidArgument):
            next(store.follow(""))
        with pytest.raises(holdfast.InvalidArgument, match="is at position 7, not yet at 8"):
            next(store.follow("root", after=8))
        child = store.session("child", parent="root")
        for unknown in ("unknown", child.id):
            with pytest.raises(holdfast.SessionNotFound, match="no tree with the root"):
                next(store.follow(unknown))
        assert next(store.follow(child, after=7)).session_id == "child"
