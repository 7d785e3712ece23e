"""Whether the results of clients of shared state can be explained by one order of their calls.

A history is linearizable if every call can be assigned a moment between its start and its return
so that, run one after another in the order of these moments, the calls would have returned what
they did. A call that never returned may have happened at any later moment, or never.

The search goes through the history in time and keeps every configuration that can explain it so
far: what the keys hold, and which of the calls in progress have had their moment. When a call
returns, only configurations in which it has had its moment survive (Wing and Gong's search with
Lowe's just-in-time linearization). Keys that no batch connects are checked separately.

Usually few orders need to be tried: each write returns its sequence, and the sequences claim one
order. If the calls would have returned the same results in that order, the history is explained, in
time proportional to its length. Otherwise the full search decides, which ignores sequences; `check`
compares those with the history separately.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .history import Recorded, out_of_order

CONFIGURATIONS_MAX = 100_000
# Along the claimed order, configurations differ only in which of the calls that never returned
# took effect. Dropping some can only lose an explanation that the full search then finds.
CLAIMED_CONFIGURATIONS_MAX = 16
STATES_SHOWN_MAX = 3

Slot: TypeAlias = "tuple[str | None, int]"
"""A key: its value as JSON, None if it does not exist, and its version, kept when it is deleted."""
State: TypeAlias = "tuple[Slot, ...]"
Configuration: TypeAlias = "tuple[State, frozenset[int]]"
MISSING: Slot = (None, 0)
NULL = "null"


class TooManyOrders(Exception):
    """The search gave up: too many calls never returned, or too many ran at the same time."""


def check(calls: Iterable[Recorded]) -> list[str]:
    """Return a sentence for every violation in a history of `RecordedState`, none if it is sound.

    The keys start empty: the history must contain every call from the beginning.
    """
    kept = [call for call in calls if call.outcome != "fail"]
    return [*unexplained(kept), *out_of_sequence(kept)]


def unexplained(calls: Sequence[Recorded]) -> list[str]:
    """Return the first result in each group of keys that no order of the calls explains."""
    keys = sorted({each["key"] for call in calls for each in operations_of(call)})
    if not _ClaimedSearch(keys, calls).violations():
        return []
    violations = []
    for keys, group in _components(calls):
        violations += _Search(keys, group).violations()
    return violations


def operations_of(call: Recorded) -> list[dict[str, Any]]:
    """Return the operations of a call, each in the form that a batch takes."""
    if call.name == "batch":
        found: list[dict[str, Any]] = call.arguments["operations"]
        return found
    return [{"op": call.name, **call.arguments}]


def _components(calls: Sequence[Recorded]) -> list[tuple[list[str], list[Recorded]]]:
    """Return the groups of keys that batches connect, each with its calls."""
    leader: dict[str, str] = {}

    def find(key: str) -> str:
        while leader.setdefault(key, key) != key:
            key = leader[key]
        return key

    for call in calls:
        first, *others = (each["key"] for each in operations_of(call))
        for key in (first, *others):
            leader[find(key)] = find(first)
    groups: dict[str, list[Recorded]] = {}
    for call in calls:
        groups.setdefault(find(operations_of(call)[0]["key"]), []).append(call)
    keys = {root: sorted(key for key in leader if find(key) == root) for root in groups}
    return [(keys[root], group) for root, group in groups.items()]


@dataclass(slots=True)
class _Call:
    """A call as the search sees it."""

    recorded: Recorded
    operations: list[tuple[int, dict[str, Any]]]
    """Its operations, each with the number of its key."""
    keys: frozenset[int]
    is_known: bool
    expected: Any
    needs: dict[int, float | None]
    """The version that each key had just before, according to its result: None if the key did not
    exist, infinite if the result does not say."""
    likeness: str
    """Equal calls that never returned are interchangeable; the first is tried first."""

    def apply(self, state: State) -> State | None:
        """Return the state after the call if it would return what it did, else None."""
        answer, after = _answer(self.operations, state)
        if self.is_known:
            return after if answer == self.expected else None
        return after if after != state else None

    def is_needed(self, state: State, needs: Mapping[int, float]) -> bool:
        """Whether one of its keys has not yet reached the version that is needed."""
        return any(state[key][1] < needs.get(key, 0) for key in self.keys)

    @property
    def changes_nothing(self) -> bool:
        """Whether it is known to have changed nothing."""
        return self.is_known and not isinstance(self.expected, list)


class _Search:
    """The search for an order of calls on some keys."""

    def __init__(self, keys: Sequence[str], calls: Sequence[Recorded]) -> None:
        numbers = {key: number for number, key in enumerate(keys)}
        self._keys = keys
        self._calls = [_call(call, numbers) for call in calls]
        moments = []
        for number, call in enumerate(calls):
            moments.append((call.asked_at_ns, 0, number))
            if call.outcome == "ok" and call.answered_at_ns is not None:
                moments.append((call.answered_at_ns, 1, number))
        self._moments = sorted(moments)

    def violations(self) -> list[str]:
        """Go through the history; return what cannot be explained, if anything."""
        configurations: set[Configuration] = {((MISSING,) * len(self._keys), frozenset())}
        pending: set[int] = set()
        for _, is_answer, number in self._moments:
            if not is_answer:
                pending.add(number)
                continue
            near = self._near(number, pending)
            survivors: set[Configuration] = set()
            for state, done in configurations:
                if number in done:
                    survivors.add((state, done - {number}))
                else:
                    survivors |= self._expanded(state, done, number, near)
            if not survivors:
                return [self._violation(number, configurations)]
            configurations = self._kept(survivors, number)
            pending.discard(number)
        return []

    def _kept(self, survivors: set[Configuration], number: int) -> set[Configuration]:
        if len(survivors) > CONFIGURATIONS_MAX:
            raise TooManyOrders(f"{len(survivors):,} configurations after {self._shown(number)}")
        return survivors

    def _near(self, number: int, pending: set[int]) -> list[int]:
        """Return the calls in progress that may affect a call, directly or through batches."""
        keys, rest, near = self._calls[number].keys, pending - {number}, [number]
        while found := [each for each in rest if self._calls[each].keys & keys]:
            near += found
            rest = rest.difference(found)
            keys = keys.union(*(self._calls[each].keys for each in found))
        return sorted(near)

    def _expanded(
        self, state: State, done: frozenset[int], number: int, near: Sequence[int]
    ) -> set[Configuration]:
        """Return the configurations in which a call has had its moment, perhaps after others."""
        found: set[Configuration] = set()
        seen: set[Configuration] = set()
        stack = [(state, done)]
        looks = [each for each in near if self._calls[each].changes_nothing]
        while stack:
            state, done = self._looked(*stack.pop(), looks)
            if number in done:
                found.add((state, done - {number}))
                continue
            if (state, done) in seen:
                continue
            seen.add((state, done))
            for each in self._next(state, done, near):
                if (after := self._calls[each].apply(state)) is not None:
                    stack.append((after, done | {each}))
        return found

    def _next(self, state: State, done: frozenset[int], near: Sequence[int]) -> Iterable[int]:
        """Return the calls in progress that may have their moment next."""
        likes: set[str] = set()
        needs = self._needs(near, done, state)
        for each in near:
            call = self._calls[each]
            if each in done:
                continue
            if not call.is_known:
                # It can wait, unless a result shows a version that has not been reached yet.
                if call.likeness in likes or not call.is_needed(state, needs):
                    continue
                likes.add(call.likeness)
            yield each

    def _needs(self, near: Sequence[int], done: frozenset[int], state: State) -> dict[int, float]:
        """Return the highest version of each key that results of calls in progress show.

        A needed batch that never returned may in turn need any version of its other keys.
        """
        needs: dict[int, float] = {}
        calls = [self._calls[each] for each in near if each not in done]
        for call in calls:
            for key, told in call.needs.items():
                to_be_deleted = math.inf if state[key][0] is not None else 0
                version = to_be_deleted if told is None else told
                needs[key] = max(version, needs.get(key, 0))
        waiting = {id(call): call for call in calls if not call.is_known and len(call.keys) > 1}
        while found := [call for call in waiting.values() if call.is_needed(state, needs)]:
            for call in found:
                needs |= dict.fromkeys(call.keys, math.inf)
                del waiting[id(call)]
        return needs

    def _looked(
        self, state: State, done: frozenset[int], looks: Sequence[int]
    ) -> tuple[State, frozenset[int]]:
        """Give reads their moment as soon as they would see what they saw, which costs nothing."""
        seen = (each for each in looks if each not in done)
        return state, done.union(
            each for each in seen if self._calls[each].apply(state) is not None
        )

    def _violation(self, number: int, configurations: Iterable[Configuration]) -> str:
        states = sorted({self._described(state, number) for state, _ in configurations})
        before = " or ".join(states[:STATES_SHOWN_MAX])
        return f"no order explains {self._shown(number)}; before it there was {before}"

    def _described(self, state: State, number: int) -> str:
        parts = []
        for key in sorted(self._calls[number].keys):
            value, version = state[key]
            stands = "nothing" if value is None else value
            parts.append(f"{self._keys[key]} = {stands} at version {version}")
        return ", ".join(parts)

    def _shown(self, number: int) -> str:
        call = self._calls[number].recorded
        return f"{call.name}({json.dumps(call.arguments)}) → {json.dumps(call.result)} [{call.id}]"


class _ClaimedSearch(_Search):
    """The search along the order that sequences claim; its failure proves nothing.

    Every mutation raises the version of one key by one, so the sequence of a state is the sum of
    its versions. The next call is the write that returned the next sequence; if there is none, it
    can only be a call that never returned.
    """

    def __init__(self, keys: Sequence[str], calls: Sequence[Recorded]) -> None:
        super().__init__(keys, calls)
        self._claims: dict[int, int] = {}
        """The number of the call that returned each sequence."""
        for number, call in enumerate(calls):
            if call.outcome == "ok" and isinstance(call.result, list):
                for entry in call.result:
                    self._claims.setdefault(entry["sequence"], number)

    def _near(self, number: int, pending: set[int]) -> list[int]:
        return sorted(pending)

    def _next(self, state: State, done: frozenset[int], near: Sequence[int]) -> Iterable[int]:
        sequence = 1 + sum(version for _, version in state)
        if sequence in self._claims:
            claimed = self._claims[sequence]
            return [claimed] if claimed in near and claimed not in done else []
        alike: dict[str, int] = {}
        for each in near:
            call = self._calls[each]
            if each not in done and not call.is_known and self._is_free(sequence, call):
                alike[call.likeness] = each
        return list(alike.values())

    def _is_free(self, sequence: int, call: _Call) -> bool:
        taken = range(sequence, sequence + len(call.operations))
        return not any(each in self._claims for each in taken)

    def _kept(self, survivors: set[Configuration], number: int) -> set[Configuration]:
        if len(survivors) <= CLAIMED_CONFIGURATIONS_MAX:
            return survivors
        # Of the calls that never returned, the latest are the likeliest to have taken effect.
        likeliest = sorted(survivors, key=lambda each: sorted(each[1], reverse=True), reverse=True)
        return set(likeliest[:CLAIMED_CONFIGURATIONS_MAX])


def _call(recorded: Recorded, numbers: Mapping[str, int]) -> _Call:
    operations = [(numbers[each["key"]], each) for each in operations_of(recorded)]
    is_known = recorded.outcome == "ok"
    return _Call(
        recorded,
        operations,
        frozenset(number for number, _ in operations),
        is_known,
        _told(recorded.result),
        _needs([number for number, _ in operations], recorded.result) if is_known else {},
        _form([each for _, each in operations]),
    )


def _told(result: Any) -> Any:
    """Return the result of a call, each value as JSON, so that 1, 1.0 and true differ."""
    if isinstance(result, list):
        return [[each["key"], _form(each["value"]), each["version"]] for each in result]
    return result and {**result, "value": _form(result["value"])}


def _needs(keys: Sequence[int], result: Any) -> dict[int, float | None]:
    """Return the version that each key had just before a call, according to its result."""
    if isinstance(result, list):
        needs: dict[int, float | None] = {}
        for key, entry in zip(keys, result, strict=False):
            needs.setdefault(key, entry["version"] - 1)
        return needs
    if result is None or "refused" not in result:
        return {keys[0]: None if result is None else result["version"]}
    if result["refused"] != "TypeConflict" and len(keys) == 1:
        return {keys[0]: result["version"] or None}
    return dict.fromkeys(keys, math.inf)


def _form(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _answer(operations: Sequence[tuple[int, dict[str, Any]]], state: State) -> tuple[Any, State]:
    """Return the result of operations that are run in a state, and the state afterwards.

    For a read: value and version, or None. For writes: key, value and version of each, or why all
    of them were refused. Values are JSON.
    """
    if operations[0][1]["op"] == "get":
        text, version = state[operations[0][0]]
        return None if text is None else {"value": text, "version": version}, state
    slots, answers = list(state), []
    for number, operation in operations:
        text, version = slots[number]
        current = 0 if text is None else version
        expected = operation.get("if_version")
        if expected is not None and expected != current:
            return _refused("VersionConflict", operation, current, text or NULL), state
        if operation["op"] == "delete" and text is None:
            return _refused("KeyNotFound", operation, 0), state
        try:
            after = _applied(operation, text)
        except TypeError:
            return _refused("TypeConflict", operation, None), state
        slots[number] = (after, version + 1)
        answers.append([operation["key"], after or NULL, version + 1])
    return answers, tuple(slots)


def _refused(
    why: str, operation: Mapping[str, Any], version: int | None, value: str = NULL
) -> dict[str, Any]:
    """Return the result of a call that was refused."""
    return {"refused": why, "key": operation["key"], "version": version, "value": value}


def _applied(operation: Mapping[str, Any], text: str | None) -> str | None:
    """Apply an operation to a value, None if it does not exist; raise TypeError if it cannot be."""
    match operation["op"]:
        case "set":
            return _form(operation["value"])
        case "delete":
            return None
        case "increment":
            number = 0 if text is None else json.loads(text)
            if type(number) not in {int, float}:
                raise TypeError
            return _form(number + operation["delta"])
    items = [] if text is None else json.loads(text)
    if type(items) is not list:
        raise TypeError
    if operation["op"] == "append":
        return _form([*items, *operation["items"]])
    members, item = {_form(each): each for each in items}, operation["item"]
    if len(members) < len(items):
        raise TypeError
    match operation["op"]:
        case "add":
            members.setdefault(_form(item), item)
        case "remove":
            members.pop(_form(item), None)
        case unknown:
            raise ValueError(f"there is no operation {unknown!r}")
    return _form(list(members.values()))


def out_of_sequence(calls: Sequence[Recorded]) -> list[str]:
    """Compare the order that sequences claim with the history and with the versions of keys."""
    written = [
        (call, [entry["sequence"] for entry in call.result])
        for call in calls
        if call.outcome == "ok" and isinstance(call.result, list)
    ]
    counts = Counter(sequence for _, sequences in written for sequence in sequences)
    violations = [f"sequence {each} was given {n} times" for each, n in counts.items() if n > 1]
    for call, sequences in written:
        if sequences != list(range(sequences[0], sequences[0] + len(sequences))):
            violations.append(f"the sequences of {call.id} are not one range: {sequences}")
    missing = max(counts, default=0) - len(counts)
    unknown = sum(len(operations_of(call)) for call in calls if call.outcome == "info")
    if missing > unknown:
        violations.append(f"{missing} sequences are missing; calls without answer had {unknown}")
    written.sort(key=lambda each: each[1][0])
    violations += out_of_order([call for call, _ in written], [call.id for call, _ in written])
    versions: dict[str, int] = {}
    for call, _ in written:
        for entry in call.result:
            if entry["version"] <= versions.get(entry["key"], 0):
                violations.append(f"{call.id} gave {entry['key']} version {entry['version']} again")
            versions[entry["key"]] = entry["version"]
    return violations
