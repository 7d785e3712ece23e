"""Places behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.served import Serving
from tests.conftest import ready


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Where a client's store can be opened."""
    serving = Serving(ready(request, tmp_path / "store.db", request.param))
    yield {"serve": serving}
    serving.close()
