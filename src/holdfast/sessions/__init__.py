"""Sessions: durable conversations or tasks, in trees, each with its status and lease."""

from .finding import FindOps
from .handles import AsyncDrivenSession, AsyncSession, DrivenSession, Session, TxSession
from .identity import Identity, current_session
from .starting import SessionsOps

__all__ = [
    "AsyncDrivenSession",
    "AsyncSession",
    "DrivenSession",
    "FindOps",
    "Identity",
    "Session",
    "SessionsOps",
    "TxSession",
    "current_session",
]
