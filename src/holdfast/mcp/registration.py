"""Registering the tools and resources on an application's own MCP server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import mcp_types as types
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from pydantic import PlainValidator, RootModel, WithJsonSchema

from ..errors import InvalidArgument
from ..store import AsyncStore
from .bound import BoundReach, bound_claim, bound_reach
from .service import JSON, Request, annotated, call_tool, read_resource
from .table import Tool
from .tools import tools
from .uris import KEY_TEMPLATE, ROOT_TEMPLATE, Address

Run = Callable[..., Coroutine[Any, Any, types.CallToolResult]]
StoreGiven = AsyncStore | Callable[[Request], AsyncStore]


def register(server: MCPServer[Any], store: StoreGiven, session: str | None) -> None:
    """Add all tools and resources to a server."""
    reach = _Reach(store, session)
    for tool in tools.all:
        added = server.tool(
            name=tool.name,
            title=tool.title,
            description=tool.about,
            annotations=annotated(tool),
        )
        added(_function(tool, reach))

    async def state(root: str, ctx: Context[Any, Any]) -> str:
        return await read_resource(reach, ctx.request_context, str(Address(root)))

    async def state_key(root: str, key: str, ctx: Context[Any, Any]) -> str:
        return await read_resource(reach, ctx.request_context, str(Address(root, key)))

    server.resource(ROOT_TEMPLATE, title="Shared state", mime_type=JSON)(state)
    server.resource(KEY_TEMPLATE, title="A key of shared state", mime_type=JSON)(state_key)


class _Reach:
    """The reach of every call: the tree of one session, which is looked up once per store."""

    def __init__(self, store: StoreGiven, session: str | None) -> None:
        if not isinstance(store, AsyncStore) and not callable(store):
            kind = type(store).__name__
            raise InvalidArgument(
                f"store must be an AsyncStore or a function that returns one, not a {kind}"
            )
        self._store = store
        self._session = session
        self._known: BoundReach | None = None

    async def __call__(self, request: Request) -> BoundReach:
        store = self._store
        if not isinstance(store, AsyncStore):
            store = store(request)
        if self._known is None or self._known.store is not store:
            self._known = await bound_reach(store, bound_claim(self._session))
        return self._known


def _function(tool: Tool, reach: _Reach) -> Run:
    """Return a function with the signature that the SDK expects for a tool."""

    async def run(ctx: Context[Any, Any], **arguments: Any) -> types.CallToolResult:
        request = ctx.request_context
        # Taken from the request, where arguments that were omitted are absent, not None.
        given = (request.params or {}).get("arguments")
        return await call_tool(tool, reach, request, given)

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=Context)
    required = set(tool.input_schema.get("required", ()))
    parameters = [
        _parameter(name, schema, is_required=name in required)
        for name, schema in tool.input_schema["properties"].items()
    ]
    run.__name__ = tool.name
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [context, *parameters], return_annotation=_result_type(tool)
    )
    return run


def _result_type(tool: Tool) -> Any:
    """Return the type from which the SDK derives the schema of the result."""
    schema = classmethod(lambda *_: tool.output_schema)
    model = type(tool.name, (RootModel[dict[str, Any]],), {"__get_pydantic_json_schema__": schema})
    return Annotated[types.CallToolResult, model]


def _parameter(name: str, schema: dict[str, Any], *, is_required: bool) -> inspect.Parameter:
    """Return a parameter that accepts any value; `call_tool` validates it.

    It is declared as a string because the SDK parses strings that look like JSON for other types.
    """
    free = Annotated[str, PlainValidator(lambda value: value), WithJsonSchema(schema)]
    default = inspect.Parameter.empty if is_required else None
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=free, default=default)
