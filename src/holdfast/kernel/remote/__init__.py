"""A store behind a server: calls are sent by name and arguments, and run there."""

from .driver import AsyncRemoteDriver, RemoteDriver

__all__ = ["AsyncRemoteDriver", "RemoteDriver"]
