"""Effects of a work item: their keys come from it, so that a retry or redrive of it finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..effects import Ledger, Result, Tool
from ..effects.calls import Calling, prepare
from ..effects.once import ONCE_SECONDS, once_of, tool_of
from ..effects.tools import OnUnknown, Verify, require_tool
from ..kernel.flow import Flow, flow
from ..kernel.operation import C
from ..records import EffectKind
from ..sessions.access import Place
from .attempt import ItemOps


class ItemEffects(ItemOps[C]):
    """What an item does through the ledger, under its own lease."""

    @flow
    def call(
        self,
        tool: Tool[..., Any],
        /,
        *,
        call_id: str | None = None,
        wait_seconds: float | None = None,
        **arguments: Any,
    ) -> Flow[Result[Any]]:
        """Run a tool once for this item: a retry or redrive of it gets the stored result."""
        return (yield from self._calling(tool, arguments, call_id, wait_seconds).run())

    @flow
    def once(
        self,
        key: str,
        function: Callable[..., Any],
        *,
        request: Any = None,
        ttl_seconds: float | None = ONCE_SECONDS,
        effect: EffectKind = "mutate",
        verify: Verify | None = None,
        on_unknown: OnUnknown = "park",
        cache_failures: bool = False,
        wait_seconds: float | None = None,
    ) -> Flow[Result[Any]]:
        """Run a function once per key of this item; another item's key is another."""
        tool, arguments = tool_of(function, request, effect, verify, on_unknown, cache_failures)
        calling = self._calling(tool, arguments, None, wait_seconds)
        return (yield from once_of(calling, key, request, ttl_seconds).run())

    def _calling(
        self,
        tool: Tool[..., Any],
        arguments: Mapping[str, Any],
        call_id: str | None,
        wait_seconds: float | None,
    ) -> Calling:
        guard = self._guard() if self.is_held else None
        place = None
        if self.session_id is not None and self.session_number is not None and self.root_id:
            fence = self.driving_fence if self.is_held else None
            place = Place(self.session_id, self.session_number, self.root_id, fence, guard)
        return prepare(
            Ledger.of(self.runtime),
            place,
            require_tool(tool),
            arguments,
            call_id=call_id,
            item=self.id,
            chain_id=self.first_id or self.id,
            wait_seconds=wait_seconds,
            holder=self.holder,
            guard=guard,
        )
