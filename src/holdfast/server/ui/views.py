"""Pages and forms as routes: what a page shows, the same as JSON, and problems as pages."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from ...access import Permission, Token
from ...answers.problems import PROBLEMS, Refusal, problem_of
from ...errors import HoldfastError
from ..context import Context
from ..endpoints import PAGES, Endpoints, Handler
from ..messages import Answer, Call, Headers
from ..options import Options
from ..pages import Cursor, Limit
from .explanations import explained
from .forms import MENDED, Around, Form, Refused, form_of, refused_of, sent_by, sentence
from .templates import Commands, Frame, render

FORM = "application/x-www-form-urlencoded"
HTML = "text/html; charset=utf-8"
ROWS = 50
ROWS_MAX = 200
POLICY = "; ".join(
    (
        "default-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # Any stricter one would have forms sent with the origin `null`.
    "referrer-policy": "same-origin",
}
HEADERS = {**SAFE, "cache-control": "no-store"}
THEME = "holdfast_theme"
# What is refused before, or because, nobody knows whose the request is.
BEFORE_TOKENS = {"unauthorized", "foreign_host", "foreign_origin", "headers_too_large"}


class PageQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The format of a page: HTML, or its data as JSON."""

    format: Literal["html", "json"] = "html"


class ListQuery(PageQuery):
    """Which part of a list."""

    cursor: Cursor | None = None
    limit: Limit = ROWS


@dataclass(slots=True, kw_only=True)
class View:
    """What a page shows."""

    template: str
    title: str
    data: Any
    """The same as JSON."""
    commands: Commands | None
    """How to get the same without a browser; None if that is not possible."""
    given: dict[str, Any] = field(default_factory=dict)
    next_cursor: str | None = None
    live: tuple[str, ...] | None = None
    """The feed whose events mean that the page may have changed: its path below /ui/."""
    poll_ms: int = 0
    """How often to reload for changes that have no events."""
    status: int = 200
    place: str | None = None
    """The page's own address, if it is not that of the request."""
    refused: Refused | None = None
    """The form of the page that was refused; such a page is not kept current."""


Page = Callable[[Call], Awaitable[View | Answer]]
P = TypeVar("P", bound=Page)


class Pages(Endpoints):
    """The pages and forms of one module."""

    def page(
        self,
        path: str,
        query: type[PageQuery] = PageQuery,
        *,
        filters: tuple[str, ...] = (),
        is_store_wide: bool = False,
    ) -> Callable[[P], P]:
        """Return a decorator that adds a function as the page at a path below /ui/.

        A refused value of one of its `filters` is shown beside its field.
        """

        def adding(handler: P) -> P:
            @functools.wraps(handler)
            async def answer(call: Call) -> Answer:
                try:
                    view = await handler(call)
                except Refusal as error:
                    field = error.members.get("pointer")
                    if field not in filters or not wants_page(call.headers):
                        raise
                    values = msgspec.to_builtins(call.query)
                    call.query = query()
                    refused = Refused("filter", str(field), sentence(str(error)), values)
                    view = await handler(call)
                    assert isinstance(view, View)
                    view.refused, view.status = refused, PROBLEMS[error.code].status
                if isinstance(view, Answer):
                    return view
                if call.query.format == "json":
                    return Answer(view.status, view.data, dict(HEADERS))
                return await shown(call, view)

            wide = {"is_store_wide": is_store_wide}
            self.add("GET", _path(path), "read", query=query, is_hidden=True, **wide)(answer)
            return handler

        return adding

    def form(
        self,
        path: str,
        body: type[Form],
        permission: Permission = "write",
        *,
        on: Around | None,
        is_store_wide: bool = False,
    ) -> Callable[[Handler], Any]:
        """Return a decorator for a form; its function handles what the form sends.

        If it is refused, the page that it is `on` is shown again with what was typed.
        """
        name = path.rpartition("/")[2]

        def adding(handler: Handler) -> Any:
            @functools.wraps(handler)
            async def answer(call: Call) -> Any:
                try:
                    call.body = form_of(call, body)
                    return await handler(call)
                except (Refusal, HoldfastError) as error:
                    problem = problem_of(error, call.instance)
                    is_mended = problem["status"] in MENDED and wants_page(call.headers)
                    if on is None or not is_mended:
                        raise
                    values = sent_by(call)
                    refused = refused_of(problem, name, body, values)
                    try:
                        return await _again(call, on, refused, problem["status"])
                    except Exception:
                        # The page no longer exists, or cannot be read now.
                        raise error from None

            given: dict[str, Any] = {"body": bytes, "media": FORM, "is_hidden": True}
            wide = {"is_store_wide": is_store_wide}
            return self.add("POST", _path(path), permission, **given, **wide)(answer)

        return adding


async def _again(call: Call, on: Around, refused: Refused, status: int) -> Answer:
    """Return the page of a form that was refused."""
    place = call.instance.rpartition("/")[0]
    call.instance = f"{place}/{on.part}" if on.part else place
    call.query = on.query(refused.values)
    view = await on.page(call)
    view.refused, view.status = refused, status
    return await shown(call, view)


def see_other(place: str, **headers: str) -> Answer:
    """Send the browser to another page."""
    return Answer(303, headers={**HEADERS, "location": place, **headers})


def page_size(call: Call) -> int:
    """Return the number of rows on a page of a list."""
    wanted: int = call.query.limit
    return min(wanted, ROWS_MAX)


def frame_of(options: Options, headers: Headers, place: str) -> Frame:
    """Return what surrounds every page."""
    cookies = headers.get("cookie")
    theme = "system"
    for part in (cookies or "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == THEME and value in {"light", "dark"}:
            theme = value
    form_token = options.sign_in.form_token(cookies)
    origin = f"{'https' if options.is_secure else 'http'}://{headers.get('host')}"
    is_read_only = options.is_read_only
    return Frame(options.base_path, place, origin, theme, form_token, is_read_only=is_read_only)


def html(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return a page."""
    return Answer(status, text.encode(), {**HEADERS, **(headers or {})}, content_type=HTML)


async def shown(call: Call, view: View) -> Answer:
    """Return a view as a page."""
    now_ms = await call.store.now_ms()
    query = {} if call.query is None else msgspec.to_builtins(call.query)
    asked = {name: value for name, value in query.items() if value is not None}
    place = view.place or _place(call.instance, asked)
    frame = frame_of(call.context.options, call.headers, place)
    frame.token, frame.now_ms = call.token, now_ms
    if view.refused is None:
        frame.live = None if view.live is None else frame.link(*view.live)
        frame.poll_ms = view.poll_ms
    frame.refused = view.refused
    frame.commands = view.commands
    frame.json_place = _place(call.instance, {**asked, "format": "json"})
    if view.next_cursor is not None:
        frame.next_place = _place(call.instance, {**asked, "cursor": view.next_cursor})
    if asked.get("cursor"):
        frame.first_place = _place(call.instance, {**asked, "cursor": ""})
    return html(render(view.template, frame, title=view.title, **view.given), view.status)


def _place(path: str, query: MutableMapping[str, Any]) -> str:
    plain = {"limit": ROWS, "format": "html"}
    told = {name: value for name, value in query.items() if value not in {"", plain.get(name)}}
    return f"{path}?{urlencode(told)}" if told else path


def _path(path: str) -> str:
    return f"{PAGES.rstrip('/')}{path}"


def wants_page(headers: Headers) -> bool:
    """Whether the request comes from a browser, not from a program."""
    return "text/html" in (headers.get("accept") or "")


async def for_people(answer: Answer, context: Context, scope: MutableMapping[str, Any]) -> Answer:
    """Return a problem as a page, if a browser requested one; it may have to sign in first."""
    headers, options = Headers(scope["headers"]), context.options
    place = scope["raw_path"].decode("latin-1")
    is_page = scope["type"] == "http" and place.startswith(f"{options.base_path}{PAGES}")
    if not is_page or not wants_page(headers):
        return answer
    query = scope["query_string"].decode("latin-1")
    if answer.status == 401 and scope["method"] in {"GET", "HEAD"}:
        wanted = f"{place}?{query}" if query else place
        return see_other(f"{options.base_path}{PAGES}login?{urlencode({'next': wanted})}")
    frame = frame_of(options, headers, place)
    frame.is_signed_out = answer.status == 401
    frame.token = await _known(answer, context, headers, scope)
    title, told = explained(answer.body)
    text = render("problem.html", frame, title=title, problem=answer.body, told=told)
    kept = {name: value for name, value in answer.headers.items() if name != "cache-control"}
    return html(text, answer.status, kept)


async def _known(
    answer: Answer, context: Context, headers: Headers, scope: MutableMapping[str, Any]
) -> Token | None:
    """Return the token of the request; None if it was not admitted, or cannot be looked up now."""
    if answer.body["error"] in BEFORE_TOKENS:
        return None
    client = scope.get("client")
    try:
        return await context.access.token(headers, client[0] if client else "", is_page=True)
    except Exception:
        return None
