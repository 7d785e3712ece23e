"""Work items: leased to one worker at a time, retried, and ended in one commit."""

from .claiming import Beat
from .insight import FailedAttempt, LeaseHealth, WorkCount
from .items import WORK_STATUSES, OnCrash, Submission, WorkStatus
from .noun import WorkNoun
from .submitting import topic
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
