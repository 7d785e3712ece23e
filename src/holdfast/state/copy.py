"""The state of one tree as the beginning of another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..codec import Codec
from ..kernel.operation import Op, Runtime
from ..sessions.access import Place
from .read import snapshot
from .rules import Rule, copy_rules, read_rules
from .write import StateWrite


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The keys of a tree at one moment, and the rules that they have now."""

    document: Mapping[str, Any]
    rules: Mapping[str, Rule]


def read_copy(codec: Codec, root_id: str, at: int) -> Op[StateCopy]:
    """Return the state at a sequence; Compacted below the floor."""
    found = yield from snapshot(codec, root_id, at)
    return StateCopy(found.document, (yield from read_rules(codec, root_id, None)))


def write_copy(runtime: Runtime, copied: StateCopy, place: Place) -> Op[None]:
    """Begin the state of a new root: one event, every key at version 1.

    Raises InvalidValue if a value does not fit the schema that its key was given later.
    """
    state = StateWrite(runtime, place)
    yield from copy_rules(state, copied.rules)
    yield from state.begin(None)
    state.write_document("init", copied.document)
    yield from state.flush()
