"""Work items: leased to one worker at a time, retried, and ended in one commit."""

from .claims import Beat
from .items import WORK_STATUSES, OnCrash, Submission, WorkStatus
from .noun import WorkNoun
from .reports import FailedAttempt, LeaseHealth, WorkCount
from .submission import topic
from .sweeping import Watchdog

__all__ = [
    "WORK_STATUSES",
    "Beat",
    "FailedAttempt",
    "LeaseHealth",
    "OnCrash",
    "Submission",
    "Watchdog",
    "WorkCount",
    "WorkNoun",
    "WorkStatus",
    "topic",
]
