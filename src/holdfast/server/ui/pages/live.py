"""The feeds that notify open pages that they may have changed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ....store import AsyncStore
from ...endpoints import Endpoints
from ...frames import Frames
from ...messages import Call
from ...routes.follow import FeedQuery, tree_feed
from ...stream import Alone, Follower, Following

routes = Endpoints()


class ChangeFrames(Frames[None]):
    """Reports that there was a change, but not which."""

    def _told(self) -> Iterator[dict[str, Any]]:
        yield {"type": "change"}


class Changes:
    """A follower that reports only that there was a change."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.begin = follower.begin
        self.close = follower.close

    @property
    def place(self) -> str:
        """The place after which the next change comes."""
        return self._follower.place

    async def next(self) -> Frames[Any] | None:
        """Return that there was a change, or None at intervals."""
        found = await self._follower.next()
        return None if found is None else ChangeFrames(None, found.place)


@routes.add(
    "GET", "/ui/sessions/{id}/live", "read", query=FeedQuery, is_hidden=True, is_followed=True
)
async def follow_tree(call: Call) -> Any:
    """Report each change in a session's tree from now on."""
    found = await tree_feed(call)
    return Following(Changes(found.follower)) if isinstance(found, Following) else found


@routes.add(
    "GET", "/ui/live", "read", is_hidden=True, is_followed=True, is_store_wide=True
)  # fmt: skip
async def follow_everything(call: Call) -> Following:
    """Report each change in any tree from now on."""
    return Following(Alone(_changes(call.store, await call.store.last_cursor()), ""))


async def _changes(store: AsyncStore, cursor: str) -> AsyncGenerator[Frames[Any], None]:
    following: Any = store.follow_all(after=cursor)
    async with contextlib.aclosing(following) as events:
        async for _ in events:
            # Nothing continues after a place: a page that was disconnected is loaded again.
            yield ChangeFrames(None, "0")
