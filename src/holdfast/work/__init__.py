"""Work items: leased to one worker at a time, retried, and ended in one commit."""

from .claiming import Beat
from .handles import AsyncWork, AsyncWorkItem, TxWork, TxWorkItem, Work, WorkItem
from .insight import Growth, LeaseHealth, WorkCount
from .items import WORK_STATUSES, OnCrash, Submission, WorkStatus
from .submitting import topic
from .sweeping import ItemsOfSessions, Swept, Watchdog, prune

__all__ = [
    "WORK_STATUSES",
    "AsyncWork",
    "AsyncWorkItem",
    "Beat",
    "Growth",
    "ItemsOfSessions",
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
