"""One server and its tokens for all tests of the folder that need one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import holdfast
from holdfast.server.options import Options, ServerLimits
from tests.server.live import Live, live


@dataclass
class Served:
    """A live server, and tokens that are limited in their ways; `server.bearer` allows all."""

    server: Live
    place: dict[str, Any]
    secrets: dict[str, str]

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('mcp')}/store.db"}
    with holdfast.open(**place) as store:
        for root in ("mine", "theirs"):
            store.session(root)
            store.session(f"{root}-child", parent=root)
            store.session(root).state.set("k", 1)
        given: dict[str, dict[str, Any]] = {
            "all": {"permission": "admin"},
            "writer": {"permission": "write", "session": "mine"},
            "reader": {"permission": "read", "session": "mine"},
        }
        secrets = {name: store.tokens.create(name, **each).secret for name, each in given.items()}
    options = Options(limits=ServerLimits(wrong_tokens_per_minute=1_000))
    with live(options, **place) as server:
        yield Served(server, place, secrets)
