"""Stores behind a server."""

from __future__ import annotations

from .arguments import shown
from .errors import InvalidArgument
from .kernel.opening import Opening
from .store import BUSY_SECONDS, AsyncStore, Store, aopen, open


def connect(
    url: str, *, token: str | None = None, busy_timeout_seconds: float = BUSY_SECONDS
) -> Store:
    """Open the store that a server serves; `open` does the same for the URL of a server.

    Calls run on the server, tools and workers here. A write whose response is lost is sent again
    and takes effect once. Everything works as in an embedded store except `run`, `within`,
    backups, export, import and `prune(archive=)`, which need the database itself.
    """
    _require_server(url)
    return open(url, token=token, busy_timeout_seconds=busy_timeout_seconds)


def aconnect(
    url: str, *, token: str | None = None, busy_timeout_seconds: float = BUSY_SECONDS
) -> Opening[AsyncStore]:
    """Open the store that a server serves, in this event loop; the arguments of `connect`."""
    _require_server(url)
    return aopen(url, token=token, busy_timeout_seconds=busy_timeout_seconds)


def _require_server(url: object) -> None:
    if not isinstance(url, str) or not url.startswith(("http://", "https://", "http+unix://")):
        raise InvalidArgument(f"{shown(url)} is not the URL of a server; use open for a database")
