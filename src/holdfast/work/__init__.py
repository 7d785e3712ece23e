"""Work items: leased to one worker at a time, retried, and ended in one commit."""

from .claiming import Beat
from .handles import AsyncWork, AsyncWorkItem, TxWork, TxWorkItem, Work, WorkItem
from .insight import FailedAttempt, Growth, LeaseHealth, WorkCount
from .items import WORK_STATUSES, OnCrash, Submission, WorkStatus
from .submitting import topic
from .sweeping import AttachedItems, Swept, Watchdog, prune

__all__ = [
    "WORK_STATUSES",
    "AsyncWork",
    "AsyncWorkItem",
    "AttachedItems",
    "Beat",
    "FailedAttempt",
    "Growth",
    "LeaseHealth",
    "OnCrash",
    "Submission",
    "Swept",
    "TxWork",
    "TxWorkItem",
    "Watchdog",
    "Work",
    "WorkCount",
    "WorkItem",
    "WorkStatus",
    "prune",
    "topic",
]
