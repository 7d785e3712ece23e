"""A work item as its handler sees it: with its lease, and with what it should know of its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import WorkCancelled
from ..items import WorkItem
from ..kernel.operation import C, Row, Runtime

if TYPE_CHECKING:
    from .attempts import Attempt


class RunningItem(WorkItem[C]):
    """The work item that a handler is given."""

    def __init__(self, runtime: Runtime, row: Row, attempt: Attempt) -> None:
        # Before the lease is over for the database it is over here: no clock needs to agree.
        super().__init__(runtime.checked(self._require_lease), row, attempt.kept.lease_seconds)
        self.attempt = attempt

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked for the item to be cancelled: the handler should stop."""
        return self.attempt.is_cancelled

    @property
    def is_draining(self) -> bool:
        """Whether the worker is about to stop: a long handler may release its item and return."""
        return self.attempt.is_draining

    @property
    def is_lost(self) -> bool:
        """Whether the lease is lost, or about to be: nothing more can be written."""
        return self.attempt.is_lost

    def check(self) -> None:
        """Raise WorkCancelled or LeaseLost if the handler should stop; cheap, for every loop."""
        self._require_lease()
        if self.is_cancelled:
            raise WorkCancelled(f"work item {self.id} was cancelled; its handler stops", id=self.id)

    def _require_lease(self) -> None:
        if self.is_lost:
            raise self._guard().lost()
