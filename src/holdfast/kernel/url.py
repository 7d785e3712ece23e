"""Database URLs: what they may say, and what each part means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from ..errors import InvalidArgument

DEFAULT_URL = "sqlite:///holdfast.db"
DEFAULT_SCHEMA = "holdfast"
_NAMESPACE = re.compile(r"(?!pg_|information_schema$)[a-z][a-z0-9_]{0,39}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00")
_KNOWN = "sqlite:///file.db, sqlite:// (a temporary file) or postgresql://user@host/database"


@dataclass(frozen=True, slots=True)
class SqliteTarget:
    """A database file; without a path, a temporary one."""

    path: Path | None
    vfs: str | None = None

    @property
    def url(self) -> str:
        """The URL that finds this store from any directory."""
        return "sqlite://" if self.path is None else f"sqlite:///{quote(str(self.path))}"


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A PostgreSQL database and the schema that holds the store."""

    dsn: str = field(repr=False)
    schema: str
    prepares: bool = True
    """False behind a pooler that cannot keep prepared statements (`?prepare=off`)."""
    listen_dsn: str | None = None
    """Where to LISTEN, past a pooler (`?listen=URL`); None with `?listen=off`: then we poll."""

    @property
    def url(self) -> str:
        """The URL that finds this store, with its password if it has one."""
        return self.dsn


Target = SqliteTarget | PostgresTarget


def parse(url: str | None, namespace: str | None) -> Target:
    """Return where a URL points; raise InvalidArgument with what is wrong with it."""
    given, is_from_environment = url, False
    if given is None:
        given = os.environ.get("HOLDFAST_URL") or DEFAULT_URL
        is_from_environment = bool(os.environ.get("HOLDFAST_URL"))
    if not isinstance(given, str):
        raise InvalidArgument(f"url must be text, not {type(given).__name__}")
    if namespace is not None and not _is_namespace(namespace):
        raise InvalidArgument(
            f"namespace {namespace!r} must be 1 to 40 of a-z, 0-9 and _, and begin with a letter "
            "but not with pg_"
        )
    # The standard parser removes them without a word, and another file would be opened.
    if _CONTROL.search(given):
        raise InvalidArgument(f"{redact(given)!r} contains a control character; remove it")
    scheme = given.partition("://")[0] if "://" in given else None
    if scheme == "sqlite":
        return _sqlite(given, namespace, must_be_absolute=is_from_environment)
    if scheme in {"postgresql", "postgres"}:
        return _postgres(given, namespace)
    raise InvalidArgument(f"{redact(given)!r} is not a database URL; use {_KNOWN}")


def redact(url: str) -> str:
    """Return a URL without its password, for messages; also one that is not well-formed."""
    url = re.sub(r"(?s)(://[^:/@]*):(?!\d*/).*@", r"\1:***@", url)
    return re.sub(r"([?&](?:ssl)?password=)[^&#]*", r"\1***", url)


def _is_namespace(namespace: object) -> bool:
    return isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace) is not None


def _sqlite(url: str, namespace: str | None, *, must_be_absolute: bool) -> SqliteTarget:
    parts = urlsplit(url)
    if parts.netloc:
        raise InvalidArgument(
            f"{redact(url)!r} names a host; a file takes three slashes (sqlite:///file.db), "
            "an absolute path four"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    vfs = options.pop("vfs", None)
    if options or parts.fragment:
        unknown = next(iter(options), parts.fragment)
        raise InvalidArgument(
            f"{redact(url)!r}: unknown option {unknown!r}; in a file name write ? as %3F, # as %23"
        )
    name = unquote(parts.path)[1:]
    if not name:
        if namespace is not None:
            raise InvalidArgument("a temporary store has no namespace; name a file")
        return SqliteTarget(None, vfs)
    if "\0" in name:
        raise InvalidArgument(f"{url!r}: a file name cannot contain a null character")
    if must_be_absolute and not name.startswith("/"):
        raise InvalidArgument(
            f"HOLDFAST_URL {url!r} is relative; child processes run elsewhere, so name an absolute "
            "path (sqlite:////home/me/agents.db)"
        )
    path = Path(os.path.realpath(name))
    if namespace is not None:
        path = path.with_name(f"{namespace}-{path.name}")
    return SqliteTarget(path, vfs)


def _postgres(url: str, namespace: str | None) -> PostgresTarget:
    # The server's library would show the password in its own message.
    if _NO_ESCAPE.search(url):
        raise InvalidArgument(f"{redact(url)!r} has a % that is no escape; write % as %25")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidArgument(f"{redact(url)!r} is not usable: {error}") from error
    if parts.netloc.count("@") > 1:
        raise InvalidArgument(f"{redact(url)!r} has a second @; write @ in a password as %40")
    options = parse_qsl(parts.query, keep_blank_values=True)
    prepare = dict(options).get("prepare", "on")
    if prepare not in {"on", "off"}:
        raise InvalidArgument(f"prepare must be on or off, not {prepare!r}")
    listen = dict(options).get("listen", "on")
    if listen not in {"on", "off"} and not listen.startswith(("postgresql://", "postgres://")):
        raise InvalidArgument("listen must be on, off or the URL of a direct connection")
    kept = [(name, value) for name, value in options if name not in {"prepare", "listen"}]
    # Unlike a form, a connection string does not read + as a space.
    dsn = urlunsplit(parts._replace(query=urlencode(kept, quote_via=quote)))
    listen_dsn = {"on": dsn, "off": None}.get(listen, listen)
    return PostgresTarget(dsn, namespace or DEFAULT_SCHEMA, prepare == "on", listen_dsn)
