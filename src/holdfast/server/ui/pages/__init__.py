"""The pages; each module shows one noun."""

from .. import files, login
from . import (
    checkpoints,
    conflicts,
    effects,
    events,
    explorations,
    live,
    overview,
    pauses,
    search,
    session,
    sessions,
    spend,
    state,
    storage,
    timeline,
    work,
)

MODULES = (
    files, login, live, overview, sessions, session, checkpoints, effects, pauses, spend, state,
    timeline, work, events, conflicts, explorations, storage, search,
)  # fmt: skip
