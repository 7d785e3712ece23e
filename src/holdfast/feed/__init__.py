"""The feed: every committed change of a session tree, once, in commit order."""

from .events import (
    by_tree,
    create_tree,
    emit,
    empty_events,
    event,
    list_trees,
    lock_tree,
    read_events,
    read_position,
    services,
    sessions_of_events,
)
from .noun import FeedNoun

__all__ = [
    "FeedNoun",
    "by_tree",
    "create_tree",
    "emit",
    "empty_events",
    "event",
    "list_trees",
    "lock_tree",
    "read_events",
    "read_position",
    "services",
    "sessions_of_events",
]
