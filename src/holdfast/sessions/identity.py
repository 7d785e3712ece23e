"""Which session a process belongs to, as its environment says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Which session this process belongs to, as its environment says."""

    id: str
    name: str | None
    root_id: str
    url: str


def current_session(environment: Mapping[str, str] | None = None) -> Identity | None:
    """Return the session that started this process, or None."""
    found = os.environ if environment is None else environment
    if not found.get("AGENT_SESSION_ID"):
        return None
    return Identity(
        id=found["AGENT_SESSION_ID"],
        name=found.get("AGENT_SESSION_NAME") or None,
        root_id=found.get("AGENT_ROOT_SESSION_ID") or found["AGENT_SESSION_ID"],
        url=found.get("HOLDFAST_URL", ""),
    )
