"""Workers: processes that run handlers of work items, and may die at any moment."""

from .attempts import AttemptOutcome, Handler, RunningItem
from .worker import Worker

__all__ = ["AttemptOutcome", "Handler", "RunningItem", "Worker"]
