"""Calls that count by a key of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..arguments import require_text
from ..errors import InvalidArgument
from ..records import EffectKind
from .calls import Calling
from .tools import TTL_SECONDS_MAX, OnUnknown, Tool, Verify, require_span

ONCE_SECONDS = 24 * 3600.0
KEY_CHARACTERS_MAX = 200


def require_key(key: object) -> None:
    """Refuse what cannot be a key."""
    require_text("key", key, KEY_CHARACTERS_MAX)


def once_of(calling: Calling, key: str, request: Any, ttl_seconds: float | None) -> Calling:
    """Return a call that counts by a key of the caller's, and for some time only."""
    require_key(key)
    require_span("ttl_seconds", ttl_seconds, TTL_SECONDS_MAX, may_be_zero=False)
    ttl_ms = None if ttl_seconds is None else round(ttl_seconds * 1000)
    return calling.asking(policy="once", distinct=key, arguments=request, ttl_ms=ttl_ms)


def tool_of(
    function: Callable[..., Any],
    request: Any,
    effect: EffectKind,
    verify: Verify | None,
    on_unknown: OnUnknown,
    cache_failures: bool,
) -> tuple[Tool[..., Any], Mapping[str, Any]]:
    """Return what `once` is to run, and with which arguments: a tool has its own rules."""
    if isinstance(function, Tool):
        return function, {} if request is None else request
    if not callable(function):
        raise InvalidArgument(f"once takes a function, not {type(function).__name__}")
    made = Tool(
        function=function,
        name=getattr(function, "__name__", type(function).__name__),
        effect=effect,
        verify=verify,
        on_unknown=on_unknown,
        cache_failures=cache_failures,
        dedupe="global",
    )
    return made, {}
