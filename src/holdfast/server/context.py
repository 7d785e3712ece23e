"""What all requests to one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..store import AsyncStore
from .access import Access, SessionFinder
from .ages import QueueAges
from .calls import Calls
from .channels import Backlog, Hub
from .limits import Refusals, Usage
from .mcp import McpMount
from .metrics import Metrics
from .options import Options

COUNTED = 1_000


@dataclass(slots=True)
class Context:
    """The open store, and the state of the server around it."""

    store: AsyncStore
    options: Options
    access: Access
    sessions: SessionFinder = field(init=False)
    calls: Calls = field(init=False)
    hub: Hub = field(init=False)
    mcp: McpMount = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)
    usage: Usage = field(init=False)
    refusals: Refusals = field(init=False)
    ages: QueueAges = field(default_factory=QueueAges)
    is_stopping: bool = False

    def __post_init__(self) -> None:
        self.sessions = SessionFinder(self.store.runtime)
        self.usage = Usage(self.options.limits, self.metrics)
        self.refusals = Refusals(self.store)
        self.calls = Calls(self.store, is_read_only=self.options.is_read_only)
        self.mcp = McpMount(self)
        limits = self.options.limits
        backlog = Backlog(limits.backlog_events, limits.backlog_bytes)
        self.hub = Hub(backlog, lambda: self.metrics.answering > 0)

    async def note_ages(self) -> None:
        """Record the current age of the oldest waiting work item."""
        counts = await self.store.work.counts(finished=False, at_most=COUNTED)
        self.ages.note(await self.store.now_ms(), counts)

    def stop(self) -> None:
        """Report the server as not ready, and end its followers."""
        self.is_stopping = True
        self.hub.stop()
        self.mcp.stop()
