"""Copying the state of one tree to a new one, for forks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..codec import Codec
from ..dataclass import dataclass
from ..kernel.operation import Op, Runtime
from ..sessions.access import Place
from .read import snapshot
from .rules import Rule, copy_rules, read_rules
from .write import StateWrite


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The keys of a tree at a sequence, and their current rules."""

    document: Mapping[str, Any]
    rules: Mapping[str, Rule]


def read_copy(codec: Codec, root_id: str, at: int) -> Op[StateCopy]:
    """Return the state at a sequence. Raises Compacted below the floor."""
    found = yield from snapshot(codec, root_id, at)
    return StateCopy(found.document, (yield from read_rules(codec, root_id, None)))


def write_copy(runtime: Runtime, copied: StateCopy, place: Place) -> Op[None]:
    """Write the initial state of a new root: one event, every key at version 1.

    Raises InvalidValue if a value does not match the current schema of its key.
    """
    state = StateWrite(runtime, place)
    yield from copy_rules(state, copied.rules)
    yield from state.begin(None)
    state.write_document("init", copied.document)
    yield state.flush()
