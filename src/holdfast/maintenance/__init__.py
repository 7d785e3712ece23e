"""Maintenance: recovery after a crash, and retention, which keeps a store small."""

from .archive import read_archive
from .recovery import Recovered, RecoveryOps
from .retention import MaintenanceOps, Pruned

__all__ = ["MaintenanceOps", "Pruned", "Recovered", "RecoveryOps", "read_archive"]
