"""The pages; each module shows one noun."""

from .. import files, login
from . import checkpoints, effects, live, overview, session, sessions, spend, state, timeline, work

MODULES = (
    files, login, live, overview, sessions, session, checkpoints, effects, spend, state, timeline,
    work,
)  # fmt: skip
