"""Tokens: who may use a server of this store, and for what.

The secret is shown once, when a token is made. The store has only its SHA-256, by which it is
looked up; 256 random bits cannot be guessed, so that needs no salt and no slow hash.
"""

from __future__ import annotations

import hashlib
import secrets
import string
from dataclasses import field
from typing import Literal, get_args

from ..arguments import (
    require_limit,
    require_one_of,
    require_seconds,
    require_text,
    require_whole,
    shown,
)
from ..dataclass import dataclass
from ..errors import Forbidden, InvalidArgument, NotFound, Refused, SessionNotFound
from ..kernel.nouns import find_row
from ..kernel.operation import C, Handle, Lock, Op, Row, fresh_id, one, operation, query, rows
from ..records import Actor
from ..sessions.access import CLOSING
from ..sessions.rows import find_place
from ..wire import travels
from .audit import record

Permission = Literal["read", "write", "approve", "admin"]
PERMISSIONS: tuple[Permission, ...] = get_args(Permission)

PREFIX = "hf_"
ALPHABET = string.digits + string.ascii_letters
# 62 ** 43 is more than 2 ** 256.
SECRET_CHARACTERS = 43
EXPIRY_SECONDS_MAX = 10 * 366 * 86_400
TOKENS_PER_PAGE_MAX = 1_000

COLUMNS = "number, id, name, permission, root_id, created_by, created_at, expires_at, revoked_at"
ALIVE = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > :now)"
ADD_TOKEN = f"""
INSERT INTO hf_tokens (
    id, name, digest, permission, root_id, created_by, created_at, expires_at
) VALUES (
    :id, :name, :digest, :permission, :root_id, :created_by, :now,
    :now + CAST(:expires_in_ms AS INTEGER)
)
ON CONFLICT DO NOTHING RETURNING {COLUMNS}
"""  # noqa: S608
FIND_TOKEN = f"SELECT {COLUMNS} FROM hf_tokens WHERE digest = :digest AND {ALIVE}"  # noqa: S608
FIND_TOKEN_BY_ID = f"SELECT {COLUMNS} FROM hf_tokens WHERE id = :id AND {ALIVE}"  # noqa: S608
LOCK_MAKER = f"""
SELECT {COLUMNS}, :now AS now FROM hf_tokens WHERE id = :id AND {ALIVE} /*pg FOR SHARE */
"""  # noqa: S608
TOKEN_ROWS = f"SELECT {COLUMNS} FROM hf_tokens"  # noqa: S608
TOKEN_BY_NAME = f"{TOKEN_ROWS} WHERE name = :name AND revoked_at IS NULL"
TOKEN_BY_ID = f"{TOKEN_ROWS} WHERE id = :id"
LIST_TOKENS = f"{TOKEN_ROWS} WHERE number > :after ORDER BY number LIMIT :limit"
REVOKE_TOKEN = f"""
UPDATE hf_tokens SET revoked_at = :now WHERE id = :id AND revoked_at IS NULL RETURNING {COLUMNS}
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token without its secret; `root_id` is the tree that it is limited to."""

    number: int
    id: str
    name: str
    permission: Permission
    root_id: str | None
    created_by: str | None
    """The token that created it; None if it was created directly in the database."""
    created_at: int
    expires_at: int | None
    revoked_at: int | None

    @property
    def actor(self) -> Actor:
        """The name in the audit trail for what is done with it."""
        return Actor(self.name, self.id)


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken(Token):
    """A new token with its secret, which is available only now."""

    secret: str = field(repr=False)


@travels
class Tokens(Handle[C]):
    """The tokens of a store."""

    @operation
    def create(
        self,
        name: str,
        *,
        permission: Permission = "read",
        session: object = None,
        expires_in_seconds: float | None = None,
        by: Token | None = None,
    ) -> Op[NewToken]:
        """Create a token and return it with its secret, which cannot be shown again.

        With `session`, it is limited to that session's tree and ends with it. `by` is the
        token on whose behalf it is created, by default that of this store; the new one must permit
        no more and last no longer, or Forbidden is raised.
        """
        require_text("name", name)
        require_one_of("permission", permission, PERMISSIONS)
        if permission == "approve" and session is not None:
            raise InvalidArgument("a token limited to one tree cannot approve; omit the session")
        expires_in_ms = _expires_in_ms(expires_in_seconds)
        maker = self.runtime.actor if by is None else _actor_of(by)
        secret = PREFIX + "".join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARACTERS))
        root_id = None if session is None else (yield from _lock_root(session))
        id = yield from fresh_id()
        asked = {"permission": permission, "root_id": root_id, "expires_in_ms": expires_in_ms}
        if maker.token_id is not None:
            yield from _require_within(maker.token_id, asked)
        named = {"id": id, "name": name, "created_by": maker.token_id}
        row = yield from one(ADD_TOKEN, **named, digest=_digest(secret), **asked)
        if row is None:
            raise Refused(
                f"there is a token named {shown(name)}; revoke it first, or choose another name"
            )
        yield from record(maker, "token_created", id, permission)
        return NewToken(**row, secret=secret)

    @query
    def find(self, secret: str) -> Op[Token | None]:
        """Return the token of a secret; None if there is none, or it was revoked or has expired."""
        if not isinstance(secret, str):
            raise InvalidArgument(f"secret must be text, not {type(secret).__name__}")
        row = yield from one(FIND_TOKEN, digest=_digest(secret))
        return None if row is None else Token(**row)

    @query
    def find_by_id(self, id: str) -> Op[Token | None]:
        """Return a token by its id; None if there is none, or it was revoked or has expired."""
        row = yield from one(FIND_TOKEN_BY_ID, id=require_text("id", id))
        return None if row is None else Token(**row)

    @query
    def list(self, *, after: int = 0, limit: int = 100) -> Op[list[Token]]:
        """Return tokens in the order of creation; revoked and expired ones for another month."""
        require_whole("after", after, 0)
        require_limit(limit, TOKENS_PER_PAGE_MAX)
        found = yield from rows(LIST_TOKENS, after=after, limit=limit)
        return [Token(**row) for row in found]

    @operation
    def revoke(self, token: str) -> Op[Token]:
        """Revoke a token at once, by its name or id; tokens that it created stay.

        One that was revoked before is returned as it is.
        """
        given = require_text("token", token)
        found = yield from one(TOKEN_BY_NAME, name=given)
        if found is None:
            found = yield from find_row("token", TOKEN_ROWS, given)
        if found is None:
            raise NotFound(f"there is no token {shown(given)}")
        revoked = yield from one(REVOKE_TOKEN, id=found["id"])
        if revoked is not None:
            yield from record(self.runtime.actor, "token_revoked", found["id"])
            return Token(**revoked)
        # Another call may have revoked it since it was found.
        revoked = yield from one(TOKEN_BY_ID, id=found["id"])
        return Token(**(revoked or found))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def _actor_of(token: object) -> Actor:
    if not isinstance(token, Token):
        raise InvalidArgument(f"by must be a token, not {type(token).__name__}")
    return token.actor


def _expires_in_ms(seconds: float | None) -> int | None:
    if seconds is None:
        return None
    most = EXPIRY_SECONDS_MAX
    return require_seconds("expires_in_seconds", seconds, most, may_be_least=False)


def _lock_root(session: object) -> Op[str]:
    """Return the root of a session's tree; it is not deleted before this transaction ends."""
    given = require_text("session", getattr(session, "id", session))
    place = yield from find_place(given)
    if place is None:
        raise SessionNotFound(f"there is no session {shown(given)}", id=given)
    root_id: str = place["root_id"]
    yield Lock(root_id)
    root = yield from find_place(root_id)
    if root is None or root["status"] in CLOSING:
        raise SessionNotFound(f"session {shown(root_id)} was deleted", id=root_id)
    return root_id


def _require_within(maker_id: str, asked: Row) -> Op[None]:
    """Refuse a token that permits more, or lasts longer, than the one that asks for it."""
    maker = yield from one(LOCK_MAKER, id=maker_id)
    if maker is None:
        raise Forbidden("the creating token was revoked or has expired", token_id=maker_id)
    problem = ""
    if PERMISSIONS.index(asked["permission"]) > PERMISSIONS.index(maker["permission"]):
        problem = f"permits only {maker['permission']}"
    elif maker["root_id"] not in {None, asked["root_id"]}:
        problem = "is limited to one tree"
    elif maker["expires_at"] is not None:
        left_ms = maker["expires_at"] - maker["now"]
        if asked["expires_in_ms"] is None or asked["expires_in_ms"] > left_ms:
            problem = "expires earlier"
    if problem:
        raise Forbidden(
            f"a token cannot create one that permits more: {shown(maker['name'])} {problem}",
            token_id=maker_id,
        )
