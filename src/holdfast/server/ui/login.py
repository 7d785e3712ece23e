"""Signing in and out with a browser, and the theme that it shows pages in."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...answers.problems import Refusal
from ..endpoints import PAGES
from ..messages import Answer, Call, Headers
from ..sign_in import set_cookie
from .forms import Form, Refused, form_of
from .templates import render
from .views import FORM, THEME, Pages, frame_of, html, see_other

routes = Pages()
OPEN: dict[str, Any] = {"is_hidden": True}
TOKEN_CHARACTERS_MAX = 512
WRONG = "This token is unknown, revoked or expired."
BRAKED = "There were too many wrong tokens; wait a minute."
USED = "This link was used already, or is older than a minute."


class LoginQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A code to sign in with, or the page that was wanted."""

    code: str = ""
    next: str = ""


class LoginForm(Form):
    """A token to sign in with."""

    token: str = ""
    next: str = ""


class ThemeForm(Form):
    """The theme, and the page to return to."""

    theme: Literal["system", "light", "dark"] = "system"
    next: str = ""


@routes.add("GET", "/", None, **OPEN)
@routes.add("GET", PAGES.rstrip("/"), None, **OPEN)
async def home(call: Call) -> Answer:
    """Send people to the dashboard."""
    return see_other(_home(call))


@routes.add("GET", "/ui/login", None, query=LoginQuery, **OPEN)
async def login(call: Call) -> Answer:
    """Show the form for a token, or accept the code in the URL that the start printed."""
    if not call.query.code:
        return _form(call, call.query.next)
    token_id = call.context.options.sign_in.use_code(call.query.code)
    if token_id is None:
        return _form(call, "", USED)
    # After a redirect, the browser would count the site of the link and withhold a strict cookie.
    frame = frame_of(call.context.options, call.headers, call.instance)
    text = render("signed_in.html", frame, title="Signed in", place=_home(call))
    return html(text, headers=_cookie(call, token_id))


@routes.add("POST", "/ui/login", None, body=bytes, media=FORM, **OPEN)
async def take_token(call: Call) -> Answer:
    """Sign in with a token."""
    found = form_of(call, LoginForm)
    given = found.token.strip()[:TOKEN_CHARACTERS_MAX]
    bearer = Headers([(b"authorization", f"Bearer {given}".encode("latin-1", "replace"))])
    try:
        token = await call.context.access.token(bearer, call.peer)
    except Refusal as refusal:
        call.context.refusals.note(refusal.code)
        is_braked = refusal.code == "rate_limited"
        return _form(call, found.next, BRAKED if is_braked else WRONG)
    return see_other(_wanted(call, found.next), **_cookie(call, token.id))


@routes.form("/logout", Form, "read", on=None)
async def sign_out(call: Call) -> Answer:
    """Sign out of this browser."""
    return see_other(f"{call.context.options.base_path}/ui/login", **_cookie(call, None))


@routes.form("/theme", ThemeForm, "read", on=None)
async def choose_theme(call: Call) -> Answer:
    """Choose how pages look in this browser."""
    path = f"{call.context.options.base_path}/ui"
    lasts = 0 if call.body.theme == "system" else 31_536_000
    cookie = f"{THEME}={call.body.theme}; Path={path}; Max-Age={lasts}; HttpOnly; SameSite=Strict"
    return see_other(_wanted(call, call.body.next), **{"set-cookie": cookie})


def _form(call: Call, wanted: str, problem: str = "") -> Answer:
    frame = frame_of(call.context.options, call.headers, call.instance)
    frame.is_signed_out = True
    # A link from another site sends no cookie; a link on this page does.
    is_from_elsewhere = call.headers.get("sec-fetch-site") in {"cross-site", "same-site"}
    given = {"next": _wanted(call, wanted), "is_from_elsewhere": is_from_elsewhere}
    if problem:
        # A token is never shown again.
        frame.refused = Refused("login", "token", problem, {})
    text = render("login.html", frame, title="Sign in", **given)
    return html(text, 401 if problem else 200)


def _cookie(call: Call, token_id: str | None) -> dict[str, str]:
    options = call.context.options
    value = "" if token_id is None else options.sign_in.cookie(token_id)
    is_secure = options.is_secure or (call.headers.get("origin") or "").startswith("https:")
    name = options.sign_in.cookie_name
    return {"set-cookie": set_cookie(name, value, options.base_path, is_secure=is_secure)}


def _home(call: Call) -> str:
    return f"{call.context.options.base_path}{PAGES}"


def _wanted(call: Call, place: str) -> str:
    """Return a page of this server; the address of another server is not followed."""
    home = _home(call)
    is_own = place.startswith(home) and place.isascii() and place.isprintable()
    return place if is_own and "\\" not in place and "//" not in place else home
