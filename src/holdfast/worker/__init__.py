"""Workers: processes that run handlers of work items, and may die at any moment."""

from .attempts import Handler, Outcome
from .items import RunningItem
from .workers import Worker

__all__ = ["Handler", "Outcome", "RunningItem", "Worker"]
