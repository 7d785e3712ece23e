"""`holdfast tokens`: who may use a server of this store."""

from __future__ import annotations

from typing import Annotated, Any, cast

from ..access import PERMISSIONS, Permission, Token
from ..access.tokens import TOKENS_PER_PAGE_MAX
from ..store import Store
from . import output
from .command import (
    After,
    Answer,
    Commands,
    Limit,
    Yes,
    argument,
    confirm,
    id_of,
    option,
    page,
    session_ids,
)

app = Commands("Create, list and revoke tokens for the server of this store.")


@app.command(mode="write")
def create(
    store: Store,
    name: Annotated[str, argument("NAME", "Its name, here and in the audit trail.")],
    permission: Annotated[
        str, option("PERMISSION", "read, write, approve or admin.", offers=PERMISSIONS)
    ] = "read",
    session: Annotated[
        str | None, option("SESSION", "Limit it to this session's tree.", offers=session_ids)
    ] = None,
    expires_in_seconds: Annotated[
        float | None, option("SECONDS", "How long it is valid.", "--expires-in")
    ] = None,
) -> Answer:
    """Create a token. Its secret is printed once, and cannot be shown again."""
    made = store.tokens.create(
        name,
        permission=cast("Permission", permission),
        session=id_of(store, session),
        expires_in_seconds=expires_in_seconds,
    )
    shown = (
        f"{made.secret}\n\nThis is the secret of token {name!r}. It is not stored and not shown "
        "again: keep it now."
    )
    return Answer(output.data(made), shown)


def token_names(store: Store) -> dict[str | None, str]:
    """Return the names of all tokens by their ids, for tables: people know no ids."""
    names: dict[str | None, str] = {}
    after = 0
    while found := store.tokens.list(after=after, limit=TOKENS_PER_PAGE_MAX):
        names |= {token.id: token.name for token in found}
        after = found[-1].number
    return names


@app.command("list", mode="read")
def list_tokens(
    store: Store,
    after: After = 0,
    limit: Limit = 100,
) -> Answer:
    """List tokens, oldest first, without their secrets."""
    now_ms = store.now_ms()
    found = store.tokens.list(after=after, limit=limit)
    names = token_names(store)
    columns: output.Columns = {
        "number": "number",
        "name": "name",
        "permission": "permission",
        "tree": "root_id",
        "state": lambda token: _state(token, now_ms),
        "made by": lambda token: names.get(token.created_by, token.created_by),
        "created": "created_at",
        "expires": "expires_at",
    }

    def data(token: Token) -> dict[str, Any]:
        return {**output.data(token), "state": _state(token, now_ms)}

    dropped = ("made by", "created", "expires")
    return page("tokens", found, data, columns, limit=limit, drop=dropped, empty="No tokens.")


@app.command(mode="write")
def revoke(
    store: Store,
    token: Annotated[str, argument("TOKEN", "Its name, its number or its id.")],
    yes: Yes = False,
) -> Answer:
    """Revoke a token: it is refused from now on."""
    confirm(f"Revoke token {token}?", yes=yes)
    revoked = store.tokens.revoke(token)
    return Answer(output.data(revoked), f"Token {revoked.name!r} is refused from now on.")


def _state(token: Token, now_ms: int) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "usable" if token.expires_at is None or token.expires_at > now_ms else "expired"
