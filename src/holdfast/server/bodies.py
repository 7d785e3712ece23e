"""Reading requests: their size, their JSON, and the types that a route takes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import parse_qsl

from ..answers.conversion import converted
from ..answers.problems import Refusal
from ..codec import Limits, from_json
from ..errors import InvalidValue, LimitExceeded
from .endpoints import Endpoint
from .messages import Headers
from .options import ServerLimits

# A value is nested a few levels deep in the body of a request.
DEPTH_AROUND = 4
FIELDS_MAX = 100
# Strings, and what precedes each value but the first: a comma, or an opening bracket that is not
# closed at once. A string that does not end takes all the rest, so that the scan is linear.
_TOKENS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|(,|[\[{](?![ \t\r\n]*+[\]}]))', re.DOTALL)


def require_one_length(headers: Headers) -> None:
    """Refuse a request whose end is ambiguous: a proxy could take its rest for another request."""
    if headers.get("content-length") is not None and headers.get("transfer-encoding") is not None:
        raise Refusal(
            "malformed",
            "Content-Length and Transfer-Encoding contradict each other",
            headers={"connection": "close"},
        )


async def read_body(receive: Callable[[], Awaitable[Any]], headers: Headers, most: int) -> bytes:
    """Return the body of a request; it is refused as soon as it is known to be too large."""
    announced = headers.get("content-length")
    if announced is not None and announced.isdecimal() and int(announced) > most:
        raise _too_large(int(announced), most)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal("malformed", "the request ended before its body was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_large(size, most)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(actual: int, limit: int) -> Refusal:
    detail = f"the body has {actual:,} bytes or more; the limit is {limit:,}"
    # The rest of the body is not read, so the connection cannot be reused.
    headers = {"connection": "close"}
    return Refusal("too_large", detail, limit=limit, actual=actual, headers=headers)


def body_type(endpoint: Endpoint, headers: Headers) -> Any:
    """Return the type of a request's body; a media type that the route does not take is refused."""
    if headers.get("content-encoding") not in {None, "identity"}:
        raise Refusal("unsupported_media_type", "compressed bodies are not accepted")
    given = (headers.get("content-type") or "").partition(";")[0].strip().lower()
    # Without Content-Type, the route's own type is assumed; a form in a browser always sends one.
    if not given and endpoint.method != "PATCH":
        return endpoint.body
    if given in endpoint.bodies:
        return endpoint.bodies[given][0]
    accept = "accept-patch" if endpoint.method == "PATCH" else "accept-post"
    accepted = {accept: ", ".join(endpoint.bodies)}
    media = " or ".join(endpoint.bodies)
    detail = f"the body must be {media}, and the header Content-Type must say so"
    raise Refusal("unsupported_media_type", detail, headers=accepted)


def parse_body(raw: bytes, wanted: Any, limits: Limits, shape: ServerLimits) -> Any:
    """Return the body of a request as the type that a route takes."""
    # The size was checked already; a number may take more bytes in the store than in the text.
    most = 9 * len(raw) + 1
    around = Limits(
        value_bytes=most,
        record_bytes=most,
        depth=min(limits.depth + DEPTH_AROUND, 256),
        digits=limits.digits,
    )
    require_few_nodes(raw, shape)
    try:
        value = from_json(raw, around, name="body")
    except InvalidValue as error:
        raise Refusal("malformed", str(error)) from None
    except LimitExceeded as error:
        raise Refusal("invalid_request", str(error), pointer=error.fields.get("path")) from None
    require_shape(value, len(raw), shape)
    return converted(value, wanted)


def require_few_nodes(raw: bytes, shape: ServerLimits) -> None:
    """Refuse JSON of too many values before it is parsed, which takes far longer than counting."""
    most = shape.json_nodes
    if len(raw) <= 2 * most:
        return
    nodes = 1
    for count, token in enumerate(_TOKENS.finditer(raw)):
        nodes += token.lastindex is not None
        # JSON has at most two strings for each value.
        if nodes > most or count > 3 * most:
            raise _unfit(f"more than {most:,} values", "json_nodes")


def require_shape(value: Any, size: int, shape: ServerLimits) -> None:
    """Refuse parsed JSON with a string or an object that is too large; `size` is its length."""
    # No key with its value takes fewer than 5 bytes.
    if size <= min(shape.json_string_bytes, 5 * shape.json_keys):
        return
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is str:
            if len(each.encode(errors="replace")) > shape.json_string_bytes:
                most = f"{shape.json_string_bytes:,}"
                raise _unfit(f"a string of more than {most} bytes", "json_string_bytes")
        elif type(each) is dict:
            if len(each) > shape.json_keys:
                raise _unfit(f"an object of more than {shape.json_keys:,} keys", "json_keys")
            waiting += each
            waiting += each.values()
        elif type(each) is list:
            waiting += each


def _unfit(what: str, limit: str) -> Refusal:
    return Refusal("invalid_request", f"the body has {what} (--limit {limit})", pointer="")


def parse_query(raw: bytes, wanted: Any) -> Any:
    """Return the parameters of a query as the type that a route takes."""
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX
        )
    except ValueError:
        raise Refusal(
            "malformed", f"the query is not UTF-8 text, or has more than {FIELDS_MAX} fields"
        ) from None
    given: dict[str, str] = {}
    for name, value in pairs:
        if name in given:
            raise Refusal("invalid_request", f"the query names {name!r} twice", pointer=name)
        given[name] = value
    if wanted is None:
        if given:
            names = ", ".join(given)
            raise Refusal(
                "invalid_request", f"this route does not accept these parameters: {names}"
            )
        return None
    return converted(given, wanted, strict=False, whole="the query")
