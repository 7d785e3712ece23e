"""Workers: processes that run the handlers of work items, and may die at any time."""

from .attempts import AttemptOutcome, Handler, RunningItem
from .worker import Worker

__all__ = ["AttemptOutcome", "Handler", "RunningItem", "Worker"]
