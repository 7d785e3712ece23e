"""Maintenance: recovery after a crash, and retention."""

from ..checkpoints.archive import read_archive
from ..records import Pruned
from .recovery import Recovered, RecoveryOps
from .retention import MaintenanceOps

__all__ = ["MaintenanceOps", "Pruned", "Recovered", "RecoveryOps", "read_archive"]
