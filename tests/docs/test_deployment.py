"""The page on deployment, tried as written: the unit of systemd, and the proxy."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.kernel.signals import TREE_TOPIC
from tests.client.test_addresses import certificate  # noqa: F401
from tests.server.processes import free_port, made_token, server_process

PAGE = Path(__file__).parents[2] / "docs/how-to/deploy-the-server.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
SECONDS_MAX = 60.0


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "holdfast"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "holdfast.service"
    unit.write_text(block("ini").replace("/opt/holdfast/bin/holdfast", str(program)))
    checked = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, str(unit) in checked.stderr) == (0, False), checked.stderr


@contextmanager
def proxy(folder: Path, text: str) -> Iterator[None]:
    """Run nginx with a part of its configuration, as whoever runs the tests."""
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{each}_temp_path {folder}/{each};\n" for each in paths)
    whole = (
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{text}}}\n"
    )
    (folder / "nginx.conf").write_text(whole)
    assert NGINX is not None
    arguments = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
    process = subprocess.Popen(arguments)
    try:
        yield
        assert process.poll() is None, (folder / "error.log").read_text()
    finally:
        process.terminate()
        process.wait(SECONDS_MAX)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_the_proxy_passes_calls_and_wake_ups(
    tmp_path: Path,
    certificate: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    secret, port = made_token(place), free_port()
    with server_process("--port=0", "--base-path=/holdfast", **place) as (_, told):
        text = (
            block("nginx")
            .replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
            .replace("http://127.0.0.1:8317", told["url"].removesuffix("/holdfast"))
            .replace("/etc/ssl/holdfast/cert.pem", certificate["certfile"])
            .replace("/etc/ssl/holdfast/key.pem", certificate["keyfile"])
        )
        monkeypatch.setenv("SSL_CERT_FILE", certificate["certfile"])
        url = f"https://127.0.0.1:{port}/holdfast"
        with proxy(tmp_path, text):
            deadline = time.monotonic() + SECONDS_MAX
            while not answers(url):
                assert time.monotonic() < deadline, (tmp_path / "error.log").read_text()
            with holdfast.connect(url, token=secret) as store:
                session = store.session("one")
                signals, topic = store.runtime.signals, TREE_TOPIC + "one"
                # The first ring tells that the WebSocket came through.
                assert signals.wait(topic, signals.count(topic), SECONDS_MAX)
                seen = signals.count(topic)
                session.append("log", [1])
                assert signals.wait(topic, seen, SECONDS_MAX)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False
