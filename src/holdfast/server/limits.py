"""The limits of a token's requests, and a count of refused ones."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from ..access import Token
from ..answers.problems import Refusal
from ..errors import HoldfastError
from ..store import AsyncStore
from .metrics import Metrics
from .options import ServerLimits

BURST_SECONDS = 2.0
AUDITED = frozenset({"unauthorized", "forbidden", "foreign_host", "foreign_origin", "rate_limited"})


class Usage:
    """What each token currently uses of the server."""

    def __init__(self, limits: ServerLimits, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._rooms: dict[str, tuple[float, float]] = {}
        self._streams: Counter[str] = Counter()

    def count_request(self, token: Token) -> None:
        """Refuse a token that exceeds its rate; a short burst is allowed."""
        rate = self._limits.requests_per_second
        if rate is None:
            return
        now = time.monotonic()
        left, before = self._rooms.get(token.id, (rate * BURST_SECONDS, now))
        left = min(rate * BURST_SECONDS, left + (now - before) * rate)
        if left < 1:
            self._rooms[token.id] = (left, now)
            raise Refusal("rate_limited", f"the token is limited to {rate} requests per second")
        self._rooms[token.id] = (left - 1, now)

    @contextlib.contextmanager
    def following(self, token: Token) -> Iterator[None]:
        """Count a follower for as long as it follows."""
        most = self._limits.streams_per_token
        if self._streams[token.id] >= most:
            raise Refusal("rate_limited", f"the token already follows {most:,} times")
        self._streams[token.id] += 1
        self._metrics.followers += 1
        try:
            yield
        finally:
            self._metrics.followers -= 1
            self._streams[token.id] -= 1
            if not self._streams[token.id]:
                del self._streams[token.id]


class Refusals:
    """Refused requests; their counts are written to the audit trail once a minute."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._counts: Counter[str] = Counter()

    def note(self, code: str) -> None:
        """Count a refusal, if its code is one that is audited."""
        if code in AUDITED:
            self._counts[code] += 1

    async def flush(self) -> None:
        """Write the counts to the audit trail."""
        counts, self._counts = self._counts, Counter()
        for code, count in counts.items():
            try:
                await self._store.audit.refused(code, count=count)
            except HoldfastError:
                self._counts[code] += count
