"""The table of routes, from which routing, OpenAPI and the reference page are derived."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from ..access import Permission
from ..answers.problems import Refusal
from .messages import JSON, Call

Handler = Callable[[Call], Awaitable[Any]]
H = TypeVar("H", bound=Handler)

MERGE_PATCH = "application/merge-patch+json"
PAGES = "/ui/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    permission: Permission | None
    """The permission that a token needs; None if no token is needed."""
    body: Any = None
    """The type of the request's body; None if it takes none."""
    media: str = JSON
    other_bodies: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The types of bodies of other media types, each with an example."""
    query: Any = None
    """The type of the query's parameters."""
    takes: tuple[str, ...] = ()
    """The request headers that it reads."""
    answers: Mapping[int, Any] = field(default_factory=dict)
    """The type of the response's body, by status; None if it has no body."""
    problems: tuple[str, ...] = ()
    example: Any = None
    """An example of a request's body."""
    is_followed: bool = False
    """Whether it can be followed, as server-sent events or over a WebSocket."""
    is_hidden: bool = False
    """Whether it is omitted from OpenAPI, because only our own client uses it."""
    is_session_checked: bool = False
    """Whether the handler looks up the session by its number, in its own transaction."""
    is_store_wide: bool = False
    """Whether a token that is limited to a tree is refused."""

    @property
    def bodies(self) -> dict[str, tuple[Any, Any]]:
        """The types of the request bodies that it takes, by media type, each with an example."""
        if self.body is None:
            return {}
        return {self.media: (self.body, self.example), **self.other_bodies}

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.handler.__name__

    @property
    def about(self) -> str:
        """What it does."""
        return " ".join((self.handler.__doc__ or "").split())

    @property
    def names_session(self) -> bool:
        """Whether the path begins with a session that must exist."""
        return self.path.removeprefix(PAGES.rstrip("/")).startswith("/sessions/{id}")

    @property
    def is_page(self) -> bool:
        """Whether it is a page of the dashboard, for which a browser signs in."""
        return self.path.startswith(PAGES)

    @property
    def segments(self) -> list[str]:
        """The parts of the path."""
        return self.path.removeprefix("/").split("/")


class Endpoints:
    """The routes of one module."""

    def __init__(self) -> None:
        self.all: list[Endpoint] = []

    def add(
        self, method: str, path: str, permission: Permission | None, **rest: Any
    ) -> Callable[[H], H]:
        """Return a decorator that adds a function as the handler of a path."""

        def adding(handler: H) -> H:
            endpoint = Endpoint(
                method=method, path=path, permission=permission, handler=handler, **rest
            )
            self.all.append(endpoint)
            return handler

        return adding


@dataclass(slots=True)
class _Node:
    """One part of a path, and the parts that may follow it."""

    named: dict[str, _Node] = field(default_factory=dict)
    any: _Node | None = None
    methods: dict[str, Endpoint] = field(default_factory=dict)


class Router:
    """Finds the route of a path by its parts, each decoded once: a key may contain a slash."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._root = _Node()
        for endpoint in endpoints:
            node = self._root
            for part in endpoint.segments:
                if part.startswith("{"):
                    node.any = node.any or _Node()
                    node = node.any
                else:
                    node = node.named.setdefault(part, _Node())
            assert endpoint.method not in node.methods, endpoint.path
            node.methods[endpoint.method] = endpoint

    def find(self, method: str, raw_path: bytes) -> tuple[Endpoint, dict[str, str]]:
        """Return the route of a request, and the values of its path parameters."""
        parts = raw_path.split(b"/")[1:]
        found = list(self._found(self._root, parts, 0))
        wanted = "GET" if method == "HEAD" else method
        for node in found:
            endpoint = node.methods.get(wanted)
            if endpoint is not None:
                given = zip(endpoint.segments, parts, strict=True)
                path = {name[1:-1]: decoded(part) for name, part in given if name[:1] == "{"}
                return endpoint, path
        allowed = sorted({each for node in found for each in node.methods})
        if not allowed:
            raise Refusal("not_found", "there is no such address")
        raise Refusal(
            "method_not_allowed",
            f"this route accepts {', '.join(allowed)}",
            headers={"allow": ", ".join(allowed)},
        )

    def _found(self, node: _Node, parts: list[bytes], at: int) -> Iterable[_Node]:
        if at == len(parts):
            if node.methods:
                yield node
            return
        named = node.named.get(parts[at].decode("latin-1"))
        if named is not None:
            yield from self._found(named, parts, at + 1)
        if node.any is not None and parts[at]:
            yield from self._found(node.any, parts, at + 1)


def decoded(part: bytes) -> str:
    """Return a part of a path, percent-decoded."""
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise Refusal("malformed", "the path is not UTF-8 text") from None
