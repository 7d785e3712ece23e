"""The routes of the server; each module translates HTTP to the handles of one noun."""

from ..endpoints import Endpoint
from ..ui import pages
from . import (
    calls,
    checkpoints,
    documents,
    effects,
    events,
    follow,
    keys,
    mcp,
    peers,
    sessions,
    spend,
    system,
    work,
)

MODULES = (
    keys, documents, events, follow, sessions, checkpoints, effects, work, peers, spend, system,
    mcp, calls,
)  # fmt: skip
ENDPOINTS: tuple[Endpoint, ...] = tuple(
    each for module in (*MODULES, *pages.MODULES) for each in module.routes.all
)
