"""The server's metrics, in the text format of Prometheus."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counts and durations of requests by route and status, and the number of followers."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._durations: dict[tuple[str, str], list[int]] = {}
        self._seconds: Counter[tuple[str, str]] = Counter()
        self.followers = 0
        self.answering = 0
        """The number of requests in progress, without those that follow."""

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is in progress."""
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count a request in progress while it only waits."""
        self.answering -= 1
        try:
            yield
        finally:
            self.answering += 1

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request; `route` is the path template, never the actual path."""
        place = (method, route)
        self._requests[*place, status] += 1
        self._seconds[place] += seconds  # type: ignore[assignment]
        counts = self._durations.setdefault(place, [0] * (len(BUCKETS) + 1))
        counts[bisect_left(BUCKETS, seconds)] += 1

    def text(self) -> str:
        """Return all metrics."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# HELP holdfast_requests_total Requests by route and status."
        yield "# TYPE holdfast_requests_total counter"
        for (method, route, status), count in sorted(self._requests.items()):
            labels = f'method="{method}",route="{route}",status="{status}"'
            yield f"holdfast_requests_total{{{labels}}} {count}"
        yield "# HELP holdfast_request_seconds How long requests took."
        yield "# TYPE holdfast_request_seconds histogram"
        for place, counts in sorted(self._durations.items()):
            labels = f'method="{place[0]}",route="{place[1]}"'
            total = 0
            for bound, count in zip((*BUCKETS, "+Inf"), counts, strict=True):
                total += count
                yield f'holdfast_request_seconds_bucket{{{labels},le="{bound}"}} {total}'
            yield f"holdfast_request_seconds_sum{{{labels}}} {self._seconds[place]:.6f}"
            yield f"holdfast_request_seconds_count{{{labels}}} {total}"
        yield "# HELP holdfast_followers Clients that are following."
        yield "# TYPE holdfast_followers gauge"
        yield f"holdfast_followers {self.followers}"
