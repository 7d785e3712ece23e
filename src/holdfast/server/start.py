"""The first start: a token in a file that only its owner can read, and the text that is printed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import store as stores
from ..errors import InvalidArgument
from ..kernel.url import SqliteTarget, parse
from ..mcp.configuration import http_configuration, stdio_configuration
from .serve import Serving

NAME = "first-start"
EXAMPLE_SESSION = "my-agent"


@dataclass(frozen=True, slots=True)
class StartToken:
    """The token that the first start created, and the file that holds its secret."""

    path: Path
    secret: str | None
    """None if the secret is not in this file."""
    id: str | None = None
    is_new: bool = False


def start_token(place: Mapping[str, Any], *, is_read_only: bool) -> StartToken:
    """Return the token from this store's token file; the first start creates it."""
    mode = "read" if is_read_only else "write"
    with stores.open(**{"mode": mode, **place}) as store:
        path = token_path(store)
        if is_read_only:
            return _kept(store, path) or StartToken(path, None)
        with _alone(path):
            return _kept(store, path) or _made(store, path)


def _kept(store: stores.Store, path: Path) -> StartToken | None:
    """Return the token in the file, if it is a token of the store."""
    secret = _read(path)
    known = None if secret is None else store.tokens.find(secret)
    return None if known is None else StartToken(path, secret, known.id)


def _made(store: stores.Store, path: Path) -> StartToken:
    """Create a token, unless the store has others."""
    now = store.now_ms()
    alive = [
        token
        for token in store.tokens.list(limit=1_000)
        if token.revoked_at is None and (token.expires_at or now + 1) > now
    ]
    name = NAME
    if not isinstance(store.runtime.target, SqliteTarget):
        # Several machines may serve one database, and each has its own token and file.
        name = f"{NAME} {socket.gethostname()}"
    if any(token.name != name for token in alive):
        return StartToken(path, None)
    # A token without its file was left by a start that was killed in between.
    for token in alive:
        store.tokens.revoke(token.id)
    made = store.tokens.create(name, permission="admin")
    _write(path, made.secret)
    return StartToken(path, made.secret, made.id, is_new=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Prevent servers that start at the same moment from creating a token each."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def token_path(store: stores.Store) -> Path:
    """Return the token file of a store: beside the database file, or in the user's settings."""
    target = store.runtime.target
    if isinstance(target, SqliteTarget):
        return Path(f"{target.path}.token")
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return settings / "holdfast" / f"{store.store_id()}.token"


def _read(path: Path) -> str | None:
    try:
        if path.stat().st_mode & 0o077:
            raise InvalidArgument(f"others can read {path}: chmod 600 it, and revoke its token")
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None


def _write(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "w") as file:
        file.write(f"{secret}\n")


def as_data(serving: Serving, token: StartToken) -> dict[str, Any]:
    """Return what the start tells a script that asked for it."""
    return {
        "url": serving.url,
        "token_file": None if token.secret is None else str(token.path),
        "dashboard": _dashboard(serving, token),
        "mcp": mcp_configurations(serving),
    }


def as_text(serving: Serving, token: StartToken, *, is_terminal: bool) -> str:
    """Return what the start tells people; a log gets neither the token nor a code to sign in."""
    is_kept = token.secret is not None
    lines = [f"Serving at {serving.url}"]
    if (dashboard := _dashboard(serving, token if is_terminal else None)) is not None:
        lines.append(f"Dashboard: {dashboard}")
    if token.is_new and is_terminal:
        lines.append(f"Token: {token.secret}")
        lines.append(f"It is stored in {token.path}, which only you can read.")
    elif is_kept:
        lines.append(f"The token is in {token.path}, which only you can read.")
    else:
        lines.append("Use an existing token, or create one: `holdfast tokens create NAME`.")
    bearer = f"$(cat {token.path})" if is_kept else "TOKEN"
    where = f"--unix-socket {serving.address.uds} http://localhost" if serving.address.uds else ""
    where = where or serving.url
    base = serving.options.base_path if serving.address.uds else ""
    curl = f'  curl -H "Authorization: Bearer {bearer}" {where}{base}/sessions'
    lines += ["", "Try it:", curl, "", "For an MCP client, on this machine or over HTTP:"]
    lines += [f"  {json.dumps(each)}" for each in mcp_configurations(serving).values()]
    return "\n".join(lines)


def mcp_configurations(serving: Serving) -> dict[str, Any]:
    """Return the configurations to paste into an MCP client, by transport."""
    store = parse(serving.place["url"], serving.place["namespace"]).shown
    found = {"stdio": stdio_configuration(store, EXAMPLE_SESSION)}
    if serving.address.uds is None:
        found["http"] = http_configuration(serving.url, EXAMPLE_SESSION)
    return found


def _dashboard(serving: Serving, token: StartToken | None) -> str | None:
    """Return the URL of the dashboard; with a token it signs in one browser, within a minute."""
    if serving.address.uds is not None:
        return None
    place = f"{serving.url}/ui/"
    if token is None or token.id is None:
        return place
    return f"{place}login?code={serving.options.sign_in.new_code(token.id)}"
