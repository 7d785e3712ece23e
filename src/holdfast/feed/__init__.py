"""The feed: every committed change of a session tree, once, in commit order."""

from .events import (
    by_tree,
    create_tree,
    emit,
    empty_events,
    event,
    list_trees,
    lock_tree,
    positions_of,
    read_events,
    services,
    some_positions_of,
    without_data,
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
    "positions_of",
    "read_events",
    "services",
    "some_positions_of",
    "without_data",
]
