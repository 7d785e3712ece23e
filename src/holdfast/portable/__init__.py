"""Sessions that move: exported to one file, imported from it, adopted from older formats."""

from .moving import Exported, Imported, PortableOps

__all__ = ["Exported", "Imported", "PortableOps"]
