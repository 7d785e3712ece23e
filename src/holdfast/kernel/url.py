"""Database URLs: parsing, validation, and redaction for messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from ..arguments import shown
from ..dataclass import dataclass
from ..errors import InvalidArgument

DEFAULT_URL = "sqlite:///holdfast.db"
DEFAULT_SCHEMA = "holdfast"
_NAMESPACE = re.compile(r"(?!pg_|information_schema$)[a-z][a-z0-9_]{0,39}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00")
# Options that messages may show, and those whose value may contain an @.
_SHOWN = {
    "host",
    "port",
    "dbname",
    "user",
    "sslmode",
    "namespace",
    "prepare",
    "listen",
    "vfs",
    "mode",
}
_MAY_HAVE_AT = {"user", "password", "sslpassword", "listen"}
_SERVERS = ("postgresql://", "postgres://")
_LOGIN_END = re.compile("[:/?#]")
_PORT = re.compile(r"^[^:\[\]]*(:\d*)?$|^\[[^\]]*\](:\d*)?$")
INSECURE = "HOLDFAST_INSECURE"
_KNOWN = (
    "sqlite:///file.db, sqlite:// (a temporary file), postgresql://user@host/database or "
    "https://server"
)


@dataclass(frozen=True, slots=True)
class SqliteTarget:
    """A database file; without a path, a temporary one."""

    path: Path | None
    vfs: str | None = None

    @property
    def url(self) -> str:
        """The URL of this store, independent of the current directory; a temporary one has none."""
        if self.path is None:
            raise InvalidArgument(
                "a temporary store (sqlite://) has no URL and no other process can open it; "
                "name a file"
            )
        vfs = "" if self.vfs is None else f"?vfs={quote(self.vfs)}"
        return f"sqlite:///{quote(str(self.path))}{vfs}"

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return "sqlite://" if self.path is None else self.url


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A PostgreSQL database and the schema that holds the store."""

    dsn: str = field(repr=False)
    schema: str
    prepares: bool = True
    """False behind a pooler that cannot keep prepared statements (`?prepare=off`)."""
    listen_dsn: str | None = field(default=None, repr=False)
    """Where to LISTEN, past a pooler (`?listen=URL`); None means polling (`?listen=off`)."""

    @property
    def url(self) -> str:
        """The full URL of this store, with namespace, options and password."""
        options = {}
        if self.schema != DEFAULT_SCHEMA:
            options["namespace"] = self.schema
        if not self.prepares:
            options["prepare"] = "off"
        if self.listen_dsn != self.dsn:
            options["listen"] = self.listen_dsn or "off"
        if not options:
            return self.dsn
        separator = "&" if "?" in self.dsn else "?"
        return f"{self.dsn}{separator}{_encode(options)}"

    @property
    def shown(self) -> str:
        """Its name in messages, without passwords."""
        return redact(self.url)


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """A Holdfast server, and the token that it knows this client by."""

    url: str
    """Without a slash at its end, and without the token."""
    token: str = field(repr=False)
    address: str
    """The same for HTTP: of a Unix socket, with a host that stands for this machine."""
    uds: str | None = None
    """The path of a Unix socket."""

    @property
    def shown(self) -> str:
        """What messages call this store."""
        return self.url

    @property
    def headers(self) -> dict[str, str]:
        """The headers by which the server knows the client."""
        return {"Authorization": f"Bearer {self.token}"}


Target = SqliteTarget | PostgresTarget | RemoteTarget


def parse(url: str | None, namespace: str | None, token: str | None = None) -> Target:
    """Return the target of a URL, or raise InvalidArgument that says what is wrong with it."""
    given, is_from_environment = url, False
    if given is None:
        given = os.environ.get("HOLDFAST_URL") or DEFAULT_URL
        is_from_environment = bool(os.environ.get("HOLDFAST_URL"))
    if not isinstance(given, str):
        raise InvalidArgument(f"url must be text, not {type(given).__name__}")
    if namespace is not None:
        _require_namespace(namespace)
    # The standard parser silently removes them, and another file would be opened.
    if _CONTROL.search(given):
        raise InvalidArgument(f"{shown(redact(given))} contains a control character; remove it")
    scheme = given.partition("://")[0] if "://" in given else None
    if scheme == "sqlite":
        return _sqlite(given, namespace, must_be_absolute=is_from_environment)
    if scheme in {"postgresql", "postgres"}:
        return _postgres(given, namespace)
    if scheme in {"http", "https", "http+unix"}:
        return _remote(given, namespace, token)
    raise InvalidArgument(f"{shown(redact(given))} is not a database URL; use {_KNOWN}")


def redact(url: str) -> str:
    """Return a URL, malformed or not, without anything that may be a password."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return guarded(url)
    place, question, query = rest.partition("?")
    options = [option.partition("=") for option in query.split("&")] if question else []
    if _has_cut_login(query):
        place, options = rest, []
    login, at, host = place.rpartition("@")
    user = _LOGIN_END.split(login, maxsplit=1)[0]
    has_password = user != login
    if not has_password and scheme in {"http", "https"}:
        user = "***" if at else user  # Probably a token.
    login = f"{user}:***" if has_password else user
    netloc = host.partition("/")[0]
    ports = [] if at or scheme == "sqlite" or "[" in netloc else netloc.split(",")
    if not all(map(_PORT.search, ports)):
        # The @ is missing or further on, and what looks like a port is a password.
        host, options = f"{netloc.partition(':')[0]}:***", []
    shown = [
        f"{name}={value if name in _SHOWN and '://' not in unquote(value) else '***'}"
        for name, _, value in options
    ]
    return f"{scheme}://{login}{at}{host}{'?' if shown else ''}{'&'.join(shown)}"


def guarded(text: str) -> str:
    """Return an address, or a part of one, unless a password or token may be in it."""
    return "…" if "@" in text or "=" in text else text


def _has_cut_login(query: str) -> bool:
    """Whether the ? before this query was part of a password."""
    options = (option.partition("=") for option in query.split("&") if option)
    return any(
        not sign or ("@" in value and name not in _MAY_HAVE_AT) for name, sign, value in options
    )


def without_values(reason: str, url: str) -> str:
    """Return a parser's message without the values that it quotes from a URL."""
    names = {option.partition("=")[0] for option in url.partition("?")[2].split("&")}
    return re.sub(r'"([^"]*)"', lambda found: found[0] if found[1] in names else '"…"', reason)


def _require_namespace(namespace: object) -> None:
    if not isinstance(namespace, str) or _NAMESPACE.fullmatch(namespace) is None:
        raise InvalidArgument(
            f"namespace {shown(namespace)} must be 1 to 40 of a-z, 0-9 and _, and begin with a "
            "letter but not with pg_"
        )


def _one_namespace(in_url: str | None, given: str | None) -> str | None:
    """Return the namespace that the URL or the argument names; they must not disagree."""
    if in_url is None:
        return given
    _require_namespace(in_url)
    if given not in {None, in_url}:
        raise InvalidArgument(
            f"the URL has the namespace {shown(in_url)}, the argument is {shown(given)}; pass one "
            "of them"
        )
    return in_url


def _sqlite(url: str, namespace: str | None, *, must_be_absolute: bool) -> SqliteTarget:
    parts = urlsplit(url)
    if parts.netloc:
        raise InvalidArgument(
            f"{shown(redact(url))} names a host; a file takes three slashes (sqlite:///file.db), "
            "an absolute path four"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    vfs = options.pop("vfs", None)
    namespace = _one_namespace(options.pop("namespace", None), namespace)
    if options or parts.fragment:
        unknown = next(iter(options), parts.fragment)
        raise InvalidArgument(
            f"{shown(redact(url))}: unknown option {shown(unknown)}; in a file name write ? as "
            "%3F, # as %23"
        )
    name = unquote(parts.path)[1:]
    if not name:
        if namespace is not None:
            raise InvalidArgument("a temporary store has no namespace; name a file")
        return SqliteTarget(None, vfs)
    if "\0" in name:
        raise InvalidArgument(f"{shown(url)}: a file name cannot contain a null character")
    if must_be_absolute and not name.startswith("/"):
        raise InvalidArgument(
            f"HOLDFAST_URL {shown(url)} is relative; child processes run elsewhere, so name an "
            "absolute path (in a shell: sqlite:///$PWD/agents.db)"
        )
    # A file that is a symbolic link is refused later; directories may be links.
    directory, file = os.path.split(name)
    path = Path(os.path.realpath(directory), file)
    if namespace is not None:
        path = path.with_name(f"{namespace}-{path.name}")
    return SqliteTarget(path, vfs)


def _postgres(url: str, namespace: str | None) -> PostgresTarget:
    parts = _server_parts(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    namespace = _one_namespace(options.pop("namespace", None), namespace)
    prepare = options.pop("prepare", "on")
    if prepare not in {"on", "off"}:
        raise InvalidArgument(f"prepare must be on or off, not {shown(prepare)}")
    listen = options.pop("listen", "on")
    if listen not in {"on", "off"}:
        if not listen.startswith(_SERVERS):
            raise InvalidArgument("listen must be on, off or the URL of a direct connection")
        _server_parts(listen)
    # `urlunsplit` would drop the // before an empty host, which is the local socket.
    query = f"?{_encode(options)}" if options else ""
    dsn = f"{parts.scheme}://{parts.netloc}{parts.path}{query}"
    listen_dsn = {"on": dsn, "off": None}.get(listen, listen)
    return PostgresTarget(dsn, namespace or DEFAULT_SCHEMA, prepare == "on", listen_dsn)


def _remote(url: str, namespace: str | None, token: str | None) -> RemoteTarget:
    if namespace is not None:
        raise InvalidArgument("a server serves one namespace; name the server that serves yours")
    parts = _server_parts(url)
    if not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidArgument(
            f"{shown(redact(url))} is not the address of a server; write http://host:port, and "
            "pass the token separately"
        )
    uds = unquote(parts.netloc) if parts.scheme == "http+unix" else None
    if uds is not None and not os.path.isabs(uds):
        raise InvalidArgument(
            f"{shown(url)} names no Unix socket; write its absolute path with / as %2F, as in "
            "http+unix://%2Frun%2Fholdfast.sock"
        )
    is_near = parts.hostname in {"localhost", "127.0.0.1", "::1"}
    if parts.scheme == "http" and not is_near and not os.environ.get(INSECURE):
        raise InvalidArgument(
            f"{shown(redact(url))} would send the token in the clear; use https, or set "
            f"{INSECURE}=1 on a network that you trust"
        )
    token = token or os.environ.get("HOLDFAST_TOKEN")
    # The file of a token ends with a line break.
    token = token.strip() if isinstance(token, str) else token
    if not token:
        raise InvalidArgument(
            "a server needs a token: set HOLDFAST_TOKEN, or pass token= in Python"
        )
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise InvalidArgument("token must be the text that `holdfast tokens create` printed")
    url = url.rstrip("/")
    address = url if uds is None else f"http://localhost{parts.path.rstrip('/')}"
    return RemoteTarget(url, token, address, uds)


def _encode(options: Mapping[str, str]) -> str:
    # Unlike a form, a connection string does not read + as a space.
    return urlencode(options, safe="/", quote_via=quote)


def _server_parts(url: str) -> SplitResult:
    """Split a server's URL; refuse one whose password would be parsed as another part."""
    shown = repr(redact(url))
    if _NO_ESCAPE.search(url):
        raise InvalidArgument(f"{shown} has a % that is not an escape; write % as %25")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        reason = "Invalid IPv6 URL" if "IPv6" in str(error) else "its host is not well-formed"
        raise InvalidArgument(f"{shown} is not usable: {reason}") from None
    if parts.netloc.count("@") > 1:
        raise InvalidArgument(f"{shown} has a second @; write @ in a password as %40")
    if "@" in parts.path or parts.fragment or _has_cut_login(parts.query):
        raise InvalidArgument(
            f"{shown} is not usable: in a user's name, a password and a database's name write "
            "/ as %2F, ? as %3F, # as %23 and @ as %40"
        )
    for host in parts.netloc.rpartition("@")[2].split(","):
        if not _PORT.search(host):
            raise InvalidArgument(f"{shown} has a port that is not a number")
    return parts
