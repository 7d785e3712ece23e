"""The feed in the life of a store."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..kernel.handle import Runtime
from ..kernel.nouns import Noun
from ..kernel.operation import Op, Query
from ..records import SessionRef
from .events import EMPTY, through_door


class FeedNoun(Noun):
    """The feed, and the trees whose order it keeps; both stay when their sessions go."""

    def remove(self, runtime: Runtime, sessions: Sequence[SessionRef]) -> Op[None]:
        """Take out what the events of deleted sessions say; they keep positions and kinds."""
        root_id = sessions[0].root_id
        empty = {
            "root_id": root_id,
            "session_ids": json.dumps(dict.fromkeys(each.id for each in sessions)),
            "data": runtime.codec.pack({}, context=("hf_events", root_id)),
        }
        yield from through_door(f"empty {root_id}", Query(EMPTY, empty))
