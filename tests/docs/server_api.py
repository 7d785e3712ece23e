"""Writes docs/server-api.md from the table of routes: python -m tests.docs.server_api."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from holdfast.answers.problems import PROBLEMS
from holdfast.server.endpoints import Endpoint
from holdfast.server.openapi import EVERY_REQUEST, WITH_TOKEN, problems_of
from holdfast.server.routes import MODULES

PAGE = Path(__file__).parents[2] / "docs" / "server-api.md"
HEAD = """# REST reference

What the [server](server.md) offers; `GET /openapi.json` has the same for programs, with the types
of every body. This page is generated from the same table.

A check mark after the method means that an `Idempotency-Key` is accepted. Besides the listed codes,
every request may be answered with {every}.
"""


def text() -> str:
    """Return the page."""
    everywhere = (*EVERY_REQUEST, *WITH_TOKEN, "read_only", "store_full", "session_not_found")
    parts = [HEAD.format(every=", ".join(f"`{code}`" for code in dict.fromkeys(everywhere)))]
    for module in MODULES:
        if module.routes.all[0].is_hidden:
            continue
        title = (module.__doc__ or "").strip().rstrip(".")
        parts.append(f"## {title}\n")
        parts += [_endpoint(each, everywhere) for each in module.routes.all]
    parts.append("## Codes\n\n| code | status | meaning | retry |\n|---|---|---|---|")
    for code, problem in sorted(PROBLEMS.items()):
        retry = "yes" if problem.retryable else ""
        parts.append(f"| `{code}` | {problem.status} | {problem.title} | {retry} |")
    return "\n".join(parts) + "\n"


def _endpoint(endpoint: Endpoint, everywhere: tuple[str, ...]) -> str:
    tick = " ✓" if "idempotency-key" in endpoint.takes else ""
    needs = f"token: {endpoint.permission}" if endpoint.permission else "no token"
    lines = [f"### `{endpoint.method} {endpoint.path}`{tick}\n", f"{endpoint.about} ({needs})\n"]
    if endpoint.query is not None:
        [schema], found = msgspec.json.schema_components([endpoint.query])
        own = found[schema["$ref"].rpartition("/")[2]]
        lines.append("Query: " + ", ".join(f"`{name}`" for name in own["properties"]) + ".")
    headers = [name for name in endpoint.takes if name != "idempotency-key"]
    if headers:
        lines.append("Headers: " + ", ".join(f"`{name}`" for name in headers) + ".")
    answers = [str(status) for status in endpoint.answers]
    codes = [code for code in problems_of(endpoint) if code not in everywhere]
    told = ", ".join([*answers, *(f"{PROBLEMS[code].status} `{code}`" for code in codes)])
    lines.append(f"Responses: {told}.\n")
    for media, (_, example) in endpoint.bodies.items():
        if example is not None:
            if endpoint.other_bodies:
                lines.append(f"`{media}`:\n")
            lines.append(f"```json\n{json.dumps(example, ensure_ascii=False)}\n```\n")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(text())
