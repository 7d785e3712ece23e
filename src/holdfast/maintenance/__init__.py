"""Maintenance: retention, which keeps a store small without losing what is still needed."""

from .archive import read_archive
from .retention import MaintenanceOps, Pruned

__all__ = ["MaintenanceOps", "Pruned", "read_archive"]
