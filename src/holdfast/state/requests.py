"""Idempotency keys of mutations of shared state, given or derived."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from ..codec import Codec
from ..dataclass import dataclass
from ..kernel.operation import PerStore, Runtime


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """An idempotency key, and the digest of its request."""

    key: str
    digest: str


def request_digest(codec: Codec, asked: Any) -> str:
    """Return a digest that only identical requests share."""
    codec.compose(asked, name="the request")
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class Ordinals(PerStore):
    """Counts equal mutations within each attempt at a work item, to derive their keys.

    Thread-safe.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._codec = runtime.codec
        self._counts: WeakKeyDictionary[Any, dict[str, Iterator[int]]] = WeakKeyDictionary()

    def key(self, item: Any, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return a key that is the same in every attempt, also after a redrive."""
        asked = request_digest(self._codec, [operation, list(args), dict(kwargs)])
        counts = self._counts.setdefault(item, {})
        # No other thread gets in between; a lock could deadlock in a signal handler.
        number = next(counts.setdefault(asked, count(1)))
        return f"item {item.first_id or item.id} {asked} {number}"
