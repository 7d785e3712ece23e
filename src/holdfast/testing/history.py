"""Recording the calls and results of clients, in files that outlive them, and checking them.

Each call writes a line before it starts and one when its outcome is known: `ok`, `fail` (it says
that nothing was written) or `info` (unknown). A call without a second line is unknown too: its
client was killed. An unknown call may have happened once or not at all, never twice.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import CommitUnknown, HoldfastError

Outcome = Literal["ok", "fail", "info"]


@dataclass(slots=True)
class Recorded:
    """One call: when it was made, when it returned, and what is known about it."""

    id: str
    name: str
    arguments: dict[str, Any]
    asked_at_ns: int
    outcome: Outcome = "info"
    result: Any = None
    answered_at_ns: int | None = field(default=None)


class History:
    """One client's file of calls. Threads of the client may share it."""

    def __init__(self, directory: Path) -> None:
        self._client = f"{os.getpid()}-{time.monotonic_ns()}"
        self._count = 0
        self._lock = threading.Lock()
        path = directory / f"{self._client}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @contextmanager
    def call(self, name: str, **arguments: Any) -> Iterator[Recorded]:
        """Record one call; set `result` on the yielded record. Errors are recorded and raised."""
        with self._lock:
            self._count += 1
            id = f"{self._client}:{self._count}"
        call = Recorded(id, name, arguments, time.monotonic_ns())
        self._write(id=id, name=name, arguments=arguments, at=call.asked_at_ns)
        try:
            yield call
        except HoldfastError as error:
            is_unknown = isinstance(error, CommitUnknown)
            self._write(id=id, outcome="info" if is_unknown else "fail", at=time.monotonic_ns())
            raise
        self._write(id=id, outcome="ok", result=call.result, at=time.monotonic_ns())

    def _write(self, **line: Any) -> None:
        # One write is one line in the file. A kill may cut the last one off.
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())


def read(directory: Path) -> list[Recorded]:
    """Return every call of every client, in the order in which they were made.

    What a kill cut off is left out: a call that was not made yet, or an answer that nobody got.
    """
    calls: dict[str, Recorded] = {}
    for path in sorted(directory.glob("*.jsonl")):
        *lines, _ = path.read_text().split("\n")
        for text in lines:
            line = json.loads(text)
            if "name" in line:
                calls[line["id"]] = Recorded(
                    line["id"], line["name"], line["arguments"], line["at"]
                )
            else:
                call = calls[line["id"]]
                call.outcome, call.answered_at_ns = line["outcome"], line["at"]
                call.result = line.get("result")
    return sorted(calls.values(), key=lambda call: call.asked_at_ns)


def lost_or_doubled(calls: Iterable[Recorded], found: Sequence[str]) -> list[str]:
    """Compare calls with the ids found in the store; return a sentence for every violation."""
    violations = [
        f"{id} is there {count} times" for id, count in Counter(found).items() if count > 1
    ]
    present = set(found)
    known = set()
    for call in calls:
        known.add(call.id)
        if call.outcome == "ok" and call.id not in present:
            violations.append(f"{call.id} was acknowledged but is lost")
        if call.outcome == "fail" and call.id in present:
            violations.append(f"{call.id} was refused but is there")
    violations += [f"{id} was never asked for" for id in sorted(present - known)]
    return violations


def out_of_order(calls: Iterable[Recorded], found: Sequence[str]) -> list[str]:
    """Return the pairs whose order contradicts real time: A ended before B began."""
    place = {id: index for index, id in enumerate(found)}
    answered = [call for call in calls if call.outcome == "ok" and call.id in place]
    moments = [(call.asked_at_ns, "asked", call) for call in answered]
    moments += [(call.answered_at_ns or 0, "answered", call) for call in answered]
    violations = []
    # Of the calls that have returned so far, the one that comes last in `found`.
    last: Recorded | None = None
    for _, moment, call in sorted(moments, key=lambda entry: entry[:2]):
        if moment == "asked" and last is not None and place[call.id] < place[last.id]:
            violations.append(f"{last.id} ended before {call.id} began but comes after it")
        if moment == "answered" and (last is None or place[call.id] > place[last.id]):
            last = call
    return violations
