"""A store behind a server: calls travel by name and arguments, and are run there."""

from .driver import AsyncRemoteDriver, RemoteDriver

__all__ = ["AsyncRemoteDriver", "RemoteDriver"]
