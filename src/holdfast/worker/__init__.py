"""Workers: processes that run handlers of work items, and may die at any moment."""

from .attempts import Handler, Outcome
from .items import AsyncRunningItem, RunningItem
from .workers import Worker

__all__ = ["AsyncRunningItem", "Handler", "Outcome", "RunningItem", "Worker"]
