"""Sessions: durable conversations or tasks, in trees, each with its status and lease."""

from .finding import FindOps
from .handles import AsyncDrivenSession, AsyncSession, DrivenSession, Session, TxSession
from .identity import Identity, IdentityOps
from .starting import SessionsOps

__all__ = [
    "AsyncDrivenSession",
    "AsyncSession",
    "DrivenSession",
    "FindOps",
    "Identity",
    "IdentityOps",
    "Session",
    "SessionsOps",
    "TxSession",
]
