"""A server in this process, asked without a network."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

import holdfast
from holdfast.server.app import Api
from holdfast.server.options import Options

_names = itertools.count(1)


class Served:
    """A store, the server over it, and a client with a token for everything."""

    def __init__(self, runner: asyncio.Runner, store: holdfast.AsyncStore, api: Api) -> None:
        self.runner = runner
        self.store = store
        self.api = api
        self.secrets = {"all": runner.run(self.token("all", permission="admin"))}
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(api), base_url="http://localhost"
        )

    def request(
        self, method: str, path: str, *, token: str | None = "all", **given: Any
    ) -> httpx.Response:
        headers = dict(given.pop("headers", None) or {})
        if token is not None:
            headers.setdefault("authorization", f"Bearer {self.secrets.get(token, token)}")
        asked = self.client.request(method, path, headers=headers, **given)
        answer: httpx.Response = self.runner.run(asked)
        return answer

    async def token(self, name: str, **given: Any) -> str:
        return (await self.store.tokens.create(name, **given)).secret

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.request("GET", path, **given)

    def put(self, path: str, **given: Any) -> httpx.Response:
        return self.request("PUT", path, **given)

    def post(self, path: str, **given: Any) -> httpx.Response:
        return self.request("POST", path, **given)

    def patch(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        media = {"content-type": "application/merge-patch+json"}
        return self.request("PATCH", path, json=body, headers=media | named)

    def delete(self, path: str, **given: Any) -> httpx.Response:
        return self.request("DELETE", path, **given)

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets['all']}"}

    def tree(self) -> tuple[str, str]:
        """Make a root and a child of it."""
        number = next(_names)
        root = self.runner.run(self._make(f"sess_{number}", None))
        return root, self.runner.run(self._make(f"child_{number}", root))

    async def _make(self, id: str, parent: str | None) -> str:
        return (await self.store.session(id, parent=parent)).id


@contextmanager
def serving(options: Options | None = None, **place: Any) -> Iterator[Served]:
    """Serve a store until the end of the block."""
    with asyncio.Runner() as runner:
        store = runner.run(_opened(place))
        served = Served(runner, store, Api(store, options))
        try:
            yield served
        finally:
            runner.run(served.client.aclose())
            runner.run(store.close())


async def _opened(place: dict[str, Any]) -> holdfast.AsyncStore:
    return await holdfast.aopen(**place)


def error(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of a problem, whose standard members must be there."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["status"] == answer.status_code
    assert {"type", "title", "error", "retryable", "request_id"} <= set(body)
    return answer.status_code, body["error"]
