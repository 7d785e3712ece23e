"""The OpenAPI description, generated from the table of routes."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from .. import __version__
from ..answers.problems import PROBLEMS, problem_body
from .endpoints import Endpoint
from .problems import CONTENT_TYPE

EVERY_REQUEST = ("malformed", "foreign_origin", "foreign_host", "headers_too_large")
WITH_TOKEN = (
    "unauthorized", "forbidden", "rate_limited", "invalid_request", "not_installed", "unavailable",
)  # fmt: skip
WITH_BODY = ("malformed", "unsupported_media_type", "too_large", "invalid_request")
WITH_WRITE = ("read_only", "store_full")
PATH = {
    "id": "The session's id.",
    "key": "The key, percent-encoded once; it may contain slashes and dots.",
    "version": "The number of a checkpoint.",
}
HEADERS = {
    "if-match": (
        "The expected version, from an `ETag`; `*` writes unconditionally.",
        r'^\*$|^"?\d{1,15}"?$|^"(g|global_version_)\d{1,15}"$',
    ),
    "if-none-match": (
        "`*` creates only; on reads, an ETag returns 304 if nothing has changed.",
        None,
    ),
    "x-if-match": ("`skip` writes unconditionally.", "^skip$"),
    "x-merge-strategy": ("How the values of keys are merged.", "^(deep|shallow)$"),
    "last-event-id": ("The position of the last event seen; it overrides the query.", None),
    "idempotency-key": (
        "Any unique text; a request repeated with the same text takes effect once.",
        r"^[!#-\[\]-~]{1,255}$",
    ),
}


@functools.cache
def document(base_path: str = "") -> dict[str, Any]:
    """Return the description of all routes."""
    from .routes import ENDPOINTS

    described = [endpoint for endpoint in ENDPOINTS if not endpoint.is_hidden]
    types = [each for endpoint in described for each in _types(endpoint)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    known = {id(given): schema for given, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in described:
        operation = _operation(endpoint, known)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": __version__,
            "description": "Durable state for AI agents.",
        },
        "servers": [{"url": base_path or "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Problem": _problem_schema()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types(endpoint: Endpoint) -> list[Any]:
    answers = [given for given in endpoint.answers.values() if given is not None]
    bodies = [given for given, _ in endpoint.bodies.values()]
    return [*bodies, *([] if endpoint.query is None else [endpoint.query]), *answers]


def _operation(endpoint: Endpoint, known: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.about,
        "tags": [endpoint.handler.__module__.rpartition(".")[2]],
        "parameters": _parameters(endpoint),
        "responses": {**_answers(endpoint, known), **_problems(endpoint)},
    }
    if endpoint.permission is None:
        operation["security"] = []
    if endpoint.body is not None:
        contents: dict[str, Any] = {}
        for media, (body, example) in endpoint.bodies.items():
            contents[media] = {"schema": known[id(body)]}
            if example is not None:
                contents[media]["example"] = example
        operation["requestBody"] = {"required": True, "content": contents}
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    found = [
        {
            "name": part[1:-1],
            "in": "path",
            "required": True,
            "description": PATH.get(part[1:-1], ""),
            "schema": {"type": "string", "minLength": 1, "maxLength": 256},
        }
        for part in endpoint.segments
        if part.startswith("{")
    ]
    if endpoint.query is not None:
        schema, components = _plain_schema(endpoint.query)
        for name, given in schema["properties"].items():
            found.append({"name": name, "in": "query", "required": False, "schema": given})
        assert not components, endpoint.path
    for name in endpoint.takes:
        about, pattern = HEADERS[name]
        schema = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
        found.append({"name": name, "in": "header", "description": about, "schema": schema})
    return found


def _plain_schema(given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    [schema], components = msgspec.json.schema_components(
        [given], ref_template="#/components/schemas/{name}"
    )
    own = components.pop(schema["$ref"].rpartition("/")[2])
    return own, components


def _answers(endpoint: Endpoint, known: dict[int, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, given in endpoint.answers.items():
        answer: dict[str, Any] = {"description": DESCRIPTIONS[status]}
        if given is not None:
            answer["content"] = {"application/json": {"schema": known[id(given)]}}
        answers[str(status)] = answer
    return answers


DESCRIPTIONS = {
    200: "Done.",
    201: "Created.",
    202: "Accepted.",
    204: "Done; no content.",
    304: "Nothing has changed.",
}


def problems_of(endpoint: Endpoint) -> tuple[str, ...]:
    """Return the problem codes that a route may respond with."""
    codes = [*EVERY_REQUEST, *endpoint.problems]
    if endpoint.permission is not None:
        codes += WITH_TOKEN
    if endpoint.names_session:
        codes.append("session_not_found")
    if endpoint.body is not None:
        codes += WITH_BODY
    if endpoint.permission not in {None, "read"}:
        codes += WITH_WRITE
    return tuple(dict.fromkeys(codes))


def _problems(endpoint: Endpoint) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in problems_of(endpoint):
        by_status.setdefault(PROBLEMS[code].status, []).append(code)
    return {
        str(status): {
            "description": "; ".join(f"`{code}`: {PROBLEMS[code].title}" for code in codes),
            "content": {
                CONTENT_TYPE: {
                    "schema": {"$ref": "#/components/schemas/Problem"},
                    "example": _example(codes[0]),
                }
            },
        }
        for status, codes in sorted(by_status.items())
    }


def _example(code: str) -> dict[str, Any]:
    return {**problem_body(code), "request_id": "9f86d081884c7d65"}


def _problem_schema() -> dict[str, Any]:
    text, flag = {"type": "string"}, {"type": "boolean"}
    return {
        "type": "object",
        "required": ["type", "title", "status", "error", "retryable", "request_id"],
        "properties": {
            "type": text,
            "title": text,
            "status": {"type": "integer"},
            "detail": text,
            "instance": text,
            "error": {"enum": sorted(PROBLEMS)},
            "retryable": flag,
            "request_id": text,
            "key": {"type": ["string", "null"]},
            "current_version": {"type": "integer"},
            "your_version": {"type": ["integer", "null"]},
            "current_value": {},
            "pointer": {"type": ["string", "null"]},
        },
    }
