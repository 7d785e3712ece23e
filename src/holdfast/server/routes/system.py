"""The server itself: health, limits, metrics and the description of its interface."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from ...answers.problems import Refusal
from ...errors import HoldfastError
from ..endpoints import Endpoints
from ..messages import Answer, Call
from ..metrics import CONTENT_TYPE as METRICS_TYPE

routes = Endpoints()


class HealthShape(msgspec.Struct):
    """Whether the server is working."""

    status: str


class LimitsShape(msgspec.Struct):
    """The limits of the server and the store."""

    server: dict[str, float | None]
    store: dict[str, int]


@routes.add("GET", "/healthz", None, answers={200: HealthShape})
async def healthz(call: Call) -> Answer:
    """Report that the process is alive."""
    return Answer(200, HealthShape("ok"))


@routes.add("GET", "/readyz", None, answers={200: HealthShape}, problems=("unavailable",))
async def readyz(call: Call) -> Answer:
    """Report whether the store can be read and the server accepts requests."""
    if call.context.is_stopping:
        raise Refusal("unavailable", "the server is stopping")
    try:
        await call.store.now_ms()
    except HoldfastError:
        raise Refusal("unavailable", "the store cannot be read") from None
    return Answer(200, HealthShape("ok"))


@routes.add("GET", "/limits", "read", answers={200: LimitsShape})
async def limits(call: Call) -> Answer:
    """Return the limits."""
    server: dict[str, Any] = asdict(call.context.options.limits)
    return Answer(200, LimitsShape(server, asdict(call.store.runtime.codec.limits)))


@routes.add("GET", "/metrics", "read", answers={200: None}, is_store_wide=True)
async def metrics(call: Call) -> Answer:
    """Return the server's metrics, in Prometheus format."""
    text = call.context.metrics.text().encode()
    return Answer(200, text, content_type=METRICS_TYPE)


@routes.add("GET", "/openapi.json", "read", answers={200: dict[str, Any]})
async def openapi(call: Call) -> Answer:
    """Describe this interface."""
    from ..openapi import document

    return Answer(200, document(call.context.options.base_path))
