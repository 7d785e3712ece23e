"""Looking at a store from outside: what it is and how it fares, without changing anything."""

from .looking import check, inspect, looking

__all__ = ["check", "inspect", "looking"]
