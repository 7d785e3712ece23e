"""The description of the interface: it is whole, and the server keeps to it whatever is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import checks

import holdfast
from holdfast.answers.problems import CODES, PROBLEMS
from holdfast.server.openapi import document, problems_of
from holdfast.server.options import Options, ServerLimits
from holdfast.server.routes import ENDPOINTS as ROUTES
from tests.server.live import Live, live

ENDPOINTS = [each for each in ROUTES if not each.is_hidden]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# What only ends with its client.
KNOWN = {"/sessions": "one", "/work-items": "item", "/asks": "request", "/requests": "request"}
FOLLOWED = {"/sessions/{id}/state/stream"}


def test_every_route_is_described() -> None:
    described = document()
    for endpoint in ENDPOINTS:
        operation = described["paths"][endpoint.path][endpoint.method.lower()]
        assert operation["summary"]
        assert set(operation["responses"]) >= {str(each) for each in endpoint.answers}
        named = set(re.findall(r"{(\w+)}", endpoint.path))
        assert named == {each["name"] for each in operation["parameters"] if each["in"] == "path"}
        if endpoint.body is not None:
            contents = operation["requestBody"]["content"]
            assert list(contents) == list(endpoint.bodies)
            for content in contents.values():
                assert "example" in content, endpoint.path
    names = [endpoint.name for endpoint in ENDPOINTS]
    assert len(names) == len(set(names))


def test_every_code_has_a_place_and_every_error_a_status() -> None:
    used = {code for endpoint in ENDPOINTS for code in problems_of(endpoint)}
    anywhere = {"method_not_allowed", "commit_unknown", "internal", "unresolved"}
    assert used | anywhere == set(PROBLEMS)
    for error, code in CODES.items():
        if error not in {holdfast.HoldfastError, holdfast.LeaseHeld}:
            assert PROBLEMS[code].status == error.http_status, error
    raised = [
        each
        for each in vars(holdfast).values()
        if isinstance(each, type) and issubclass(each, holdfast.HoldfastError)
    ]
    assert all(any(base in CODES for base in each.__mro__) for each in raised)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path_factory.mktemp('openapi')}/store.db"}
    with holdfast.open(**place) as store:
        session = store.session("one")
        session.save({"c": [1]})
        session.state.set("k", 1)
        store.work.submit("t", id="item")
        store.request("planner", request_id="request")
        waiting = store.session("waiting", agent="planner")
        waiting.wait_for_approval("pay?")
        [pause] = waiting.pauses()
    limits = ServerLimits(wrong_tokens_per_minute=1_000_000, wait_seconds=0.05)
    with live(Options(limits=limits), **place) as server:
        KNOWN["/pauses"] = pause.id
        yield server


def with_known_names(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description with examples of names, so that some requests find something."""
    for path, operations in description["paths"].items():
        for operation in operations.values():
            for parameter in operation["parameters"]:
                prefix = next((each for each in KNOWN if path.startswith(each)), None)
                if parameter["name"] == "id" and prefix:
                    parameter["schema"] = {"anyOf": [{"const": KNOWN[prefix]}, parameter["schema"]]}
    return description


@pytest.mark.parametrize("examples", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_whatever_is_sent_is_answered_as_described(server: Live, examples: int) -> None:
    described = with_known_names(server.client.get("/openapi.json").json())
    schema = schemathesis.openapi.from_dict(described)
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    tried = 0
    operations: list[Any] = list(schema.get_all_operations())
    for operation in (each.ok() for each in operations):
        if operation.path in FOLLOWED:
            continue

        @settings
        @hypothesis.given(case=operation.as_strategy())
        def send(case: Any) -> None:
            case.call_and_validate(base_url=server.url, headers=server.bearer, checks=CHECKS)

        send()
        tried += 1
    assert tried == len(ENDPOINTS) - len(FOLLOWED)
    assert server.client.get("/readyz").status_code == 200
