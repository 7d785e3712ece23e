"""The table of tools: the arguments, result and function of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args

import msgspec

from .caller import Caller, Permission

Run = Callable[[Caller, Any], Awaitable[Any]]
R = TypeVar("R", bound=Run)
Schema = dict[str, Any]

SessionId = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=256,
        description="The id of your session; omit it if the connection already identifies you.",
    ),
]
IdempotencyKey = Annotated[
    str,
    msgspec.Meta(
        min_length=1,
        max_length=255,
        description="Any string; repeating a call with the same key applies it only once.",
    ),
]


class Arguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The arguments of every tool."""

    session: SessionId | None = None


class WriteArguments(Arguments, kw_only=True):
    """The arguments of every tool that writes."""

    idempotency_key: IdempotencyKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool."""

    name: str
    title: str
    about: str
    """The description that a model reads; it never contains stored data."""
    takes: type[Arguments]
    input_schema: Schema
    output_schema: Schema
    run: Run
    permission: Permission
    is_destructive: bool
    is_idempotent: bool


class Tools:
    """The tools, in the order in which they are listed."""

    def __init__(self) -> None:
        self.all: list[Tool] = []

    def add(
        self,
        title: str,
        permission: Permission,
        *,
        takes: type[Arguments],
        gives: Any,
        is_destructive: bool = False,
        is_idempotent: bool = True,
    ) -> Callable[[R], R]:
        """Return a decorator that adds a function as a tool of the same name.

        `gives` is the type of its result, or a union of types. The docstring is the description.
        """

        def adding(run: R) -> R:
            tool = Tool(
                name=run.__name__,
                title=title,
                about=" ".join((run.__doc__ or "").split()),
                takes=takes,
                input_schema=_schema(takes),
                output_schema=_schema(gives),
                run=run,
                permission=permission,
                is_destructive=is_destructive,
                is_idempotent=is_idempotent,
            )
            self.all.append(tool)
            return run

        return adding


def _schema(kind: Any) -> Schema:
    """Return a schema whose root is an object, which older clients need, without references."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    found, parts = msgspec.json.schema_components(kinds, ref_template="{name}")
    roots = [_inlined(each, parts) for each in found]
    return roots[0] if len(roots) == 1 else {"type": "object", "anyOf": roots}


def _inlined(schema: Any, parts: Schema) -> Any:
    if isinstance(schema, list):
        return [_inlined(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = {name: each for name, each in parts[schema["$ref"]].items() if name != "title"}
    return {name: _inlined(each, parts) for name, each in schema.items()}
