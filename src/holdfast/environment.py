"""The session that started this process, as its environment names it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .errors import InvalidArgument
from .kernel.health import read_only_driver
from .kernel.operation import Call
from .kernel.url import parse
from .sessions import Identity, IdentityOps
from .store import read_settings


def current_session(environment: Mapping[str, str] | None = None) -> Identity | None:
    """Return the session that started this process, as read from its store, or None.

    The environment names the store (`HOLDFAST_URL`) and the session. Raises Forbidden if it names
    another root than the session's, and SessionNotFound if the store has no such session.
    """
    found = os.environ if environment is None else environment
    if not isinstance(found, Mapping):
        raise InvalidArgument(f"environment must be a dict, not {type(found).__name__}")
    id, url = found.get("AGENT_SESSION_ID"), found.get("HOLDFAST_URL")
    if not id or not url:
        return None
    with read_only_driver(parse(url, None, found.get("HOLDFAST_TOKEN")), read_settings()) as driver:
        asked = (id, found.get("AGENT_ROOT_SESSION_ID"), url)
        return driver.run(Call(IdentityOps.find, IdentityOps(), asked))
