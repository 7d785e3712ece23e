"""An HTTP service that can be reset: a state is restored by sending its requests again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal, Protocol, get_args

from ...arguments import require_one_of
from ...errors import Conflict, ReplayFailed
from ..system import System, identity_of, observation_of
from ..values import decode, encode

Compare = Literal["content", "status", "nothing"]

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Response(Protocol):
    """The response of a client, as in httpx and requests."""

    @property
    def status_code(self) -> int:
        """The status."""
        ...

    @property
    def content(self) -> bytes:
        """The body."""
        ...


class Client(Protocol):
    """A client that sends requests, such as an httpx.Client or a requests.Session."""

    @property
    def request(self) -> Callable[..., Any]:
        """A function of method, URL and options that returns the response."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A request that was sent, the one before it, and its response."""

    before: _Sent | None
    method: str
    url: str
    options: bytes
    answer: tuple[int, bytes]


class HttpSystem(System):
    """A service, used through `request`; rolling back resets it and sends the requests again.

    `reset` brings the service to its first state. `observe` returns what a state shows, by
    asking the service. Responses are compared with the original ones: their status and `content`,
    or only their `status`, or `nothing` if they are never the same.
    """

    # A rollback begins with a reset, so earlier requests do not matter.
    is_interruptible = True
    not_covered = (
        "requests that were not sent through the system, or that go to another service",
        "the cost of a rollback grows with the number of requests since the reset",
    )

    def __init__(
        self,
        client: Client,
        *,
        reset: Callable[[], object],
        observe: Callable[[], object],
        compare: Compare = "content",
    ) -> None:
        self._client = client
        self._reset = reset
        self._observe = observe
        self._compare: Compare = require_one_of("compare", compare, get_args(Compare))
        self._last: _Sent | None = None
        self._require_reset()

    def request(self, method: str, url: str, **options: Any) -> Any:
        """Send a request; one that may change something is recorded; its options are plain data."""
        if method.upper() in _SAFE:
            return self._client.request(method, url, **options)
        kept = encode(options, "options")
        response = self._client.request(method, url, **options)
        self._last = _Sent(self._last, method, url, kept, self._answer(response))
        return response

    def checkpoint(self, name: str) -> tuple[_Sent | None]:
        """Return the requests that led to this state."""
        return (self._last,)

    def rollback(self, token: tuple[_Sent | None]) -> None:
        """Reset the service and send the requests again; raise if a response differs."""
        sent = _all_sent(token[0])
        self._reset()
        self._last = None
        for number, step in enumerate(sent, 1):
            response = self._client.request(step.method, step.url, **decode(step.options))
            self._last = step
            if self._answer(response) != step.answer:
                raise ReplayFailed(
                    f"Request {number} of the replay, {step.method} {step.url}, got a different "
                    f"response than before (status {response.status_code})",
                    step=number,
                )

    def keep(self, token: tuple[_Sent | None]) -> object:
        """Return the requests with their responses."""
        return [(sent.method, sent.url, sent.options, sent.answer) for sent in _all_sent(token[0])]

    def restore(self, kept: list[tuple[str, str, bytes, tuple[int, bytes]]]) -> None:
        """Reset the service and send the requests again."""
        last = None
        for sent in kept:
            last = _Sent(last, *sent)
        self.rollback((last,))

    def observe(self) -> object:
        """Return what the service shows."""
        return self._observe()

    def _answer(self, response: Response) -> tuple[int, bytes]:
        if self._compare == "nothing":
            return 0, b""
        body = response.content if self._compare == "content" else b""
        return response.status_code, sha256(body).digest()

    def _require_reset(self) -> None:
        """Reset twice, and compare what the service shows."""
        states = []
        for _ in range(2):
            self._reset()
            states.append(identity_of(observation_of("service", self)))
        if states[0] != states[1]:
            raise Conflict("Two resets lead to different states, so nothing could be replayed.")


def _all_sent(last: _Sent | None) -> list[_Sent]:
    """Return the requests up to this one, oldest first."""
    sent: list[_Sent] = []
    while last is not None:
        sent.append(last)
        last = last.before
    return sent[::-1]
