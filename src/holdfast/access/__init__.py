"""Access: tokens for a server, and the audit trail of what was decided."""

from .audit import Audit, AuditCheck, AuditRecord, record
from .noun import AccessNoun
from .tokens import PERMISSIONS, NewToken, Permission, Token, Tokens

__all__ = [
    "PERMISSIONS",
    "AccessNoun",
    "Audit",
    "AuditCheck",
    "AuditRecord",
    "NewToken",
    "Permission",
    "Token",
    "Tokens",
    "record",
]
