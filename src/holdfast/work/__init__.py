"""Work items: leased to one worker at a time, retried, and ended in one commit."""

from .claims import Beat
from .items import WORK_STATUSES, OnCrash, Submission, WorkStatus
from .noun import WorkNoun
from .reports import FailedAttempt, LeaseHealth, WorkCount
from .submission import topic

__all__ = [
    "WORK_STATUSES",
    "Beat",
    "FailedAttempt",
    "LeaseHealth",
    "OnCrash",
    "Submission",
    "WorkCount",
    "WorkNoun",
    "WorkStatus",
    "topic",
]
