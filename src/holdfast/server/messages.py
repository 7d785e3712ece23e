"""What a handler takes and returns: an admitted request, and the response to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from ..session import Session
from ..store import AsyncStore

if TYPE_CHECKING:
    from ..access import Token
    from .context import Context
    from .endpoints import Endpoint

JSON = "application/json"


class Nothing:
    """Stands for the body of a response that has none."""


NOTHING: Final = Nothing()
encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Answer:
    """A response; a body that is not bytes is sent as JSON."""

    status: int = 200
    body: Any = NOTHING
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = JSON

    def content(self) -> bytes:
        """Return the bytes of the body."""
        if self.body is NOTHING:
            return b""
        return self.body if isinstance(self.body, bytes) else encode(self.body)


class Headers:
    """The headers of a request, by lower-case name."""

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, str] = {}
        for raw_name, raw_value in pairs:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip()
            known = self._values.get(name)
            self._values[name] = value if known is None else f"{known}, {value}"

    def get(self, name: str) -> str | None:
        """Return a header; the values of one that was sent several times are joined by commas."""
        return self._values.get(name)


@dataclass(slots=True)
class Call:
    """An admitted request."""

    context: Context
    endpoint: Endpoint
    token: Token
    headers: Headers
    instance: str
    path: Mapping[str, str]
    query: Any = None
    body: Any = None
    raw_body: bytes = b""
    is_websocket: bool = False
    peer: str = ""
    """The address that the request comes from."""
    found: Session[Any] | None = None

    @property
    def session(self) -> Session[Any]:
        """The session that the path names."""
        assert self.found is not None
        return self.found

    @property
    def wants_events(self) -> bool:
        """Whether the client wants to follow, over a WebSocket or as server-sent events."""
        accepted = self.headers.get("accept") or ""
        return self.is_websocket or "text/event-stream" in accepted

    @property
    def store(self) -> AsyncStore:
        """The store that the server serves."""
        return self.context.store

    def address(self, noun: str, id: str) -> str:
        """Return the path of a resource, as used in a header."""
        return f"{self.context.options.base_path}/{noun}/{quote(id, safe='')}"

    @property
    def acting_store(self) -> AsyncStore:
        """The store on behalf of the token, for operations that the audit trail records."""
        return self.context.store.on_behalf_of(self.token)

    @property
    def acting(self) -> Session[Any]:
        """The session of the path, on behalf of the token."""
        found = self.session
        place = (found.id, found.number, found.root_id, found.name)
        return Session(self.acting_store.runtime, *place)
