"""Places behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.served import Serving


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Where a client's store can be opened."""
    database = {"url": f"sqlite:///{tmp_path}/store.db"}
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_dsn")
        database = {"url": url, "namespace": request.getfixturevalue("ready_namespace")}
    serving = Serving(database)
    yield {"serve": serving}
    serving.close()
