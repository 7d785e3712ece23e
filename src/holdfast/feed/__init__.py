"""The feed: every committed change of a session tree, once, in commit order."""

from .events import (
    by_tree,
    create_statement,
    create_tree,
    emit,
    empty_events,
    event,
    event_statements,
    events_if_done,
    list_trees,
    lock_free_statement,
    lock_statement,
    lock_tree,
    read_events,
    read_position,
    sessions_of_events,
)
from .noun import FeedNoun

__all__ = [
    "FeedNoun",
    "by_tree",
    "create_statement",
    "create_tree",
    "emit",
    "empty_events",
    "event",
    "event_statements",
    "events_if_done",
    "list_trees",
    "lock_free_statement",
    "lock_statement",
    "lock_tree",
    "read_events",
    "read_position",
    "sessions_of_events",
]
