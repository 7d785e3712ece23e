"""Transports over a real NATS server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.mesh.nats import Nats
from tests.nats_server import NatsServer


@pytest.fixture
def prefix() -> str:
    """What keeps the messages of one test from those of another."""
    return f"t-{uuid.uuid4().hex[:20]}"


@pytest.fixture
def make_nats(nats_url: str, prefix: str) -> Iterator[Callable[..., Nats]]:
    """Makes transports that reach each other, and closes them."""
    made: list[Nats] = []

    def make(**given: float) -> Nats:
        made.append(Nats(nats_url, prefix=prefix, **given))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own, which a test may stop and start."""
    with NatsServer(tmp_path / "nats") as server:
        yield server
