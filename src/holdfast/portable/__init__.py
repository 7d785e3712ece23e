"""Sessions that move: exported to one file, imported from it, adopted from older formats."""

from .api import PortableOps

__all__ = ["PortableOps"]
