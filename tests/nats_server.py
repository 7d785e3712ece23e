"""A NATS server from its wheel, on loopback."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

START_SECONDS_MAX = 180.0


class NatsServer:
    """A process that keeps its streams in a directory and can be started again on its port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None
        found = shutil.which("nats-server", path=str(Path(sys.executable).parent))
        self._binary = found or shutil.which("nats-server")
        assert self._binary is not None, "nats-server is not installed"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        ports = self._directory / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir(parents=True)
        assert self._binary is not None
        command = [self._binary, "--addr", "127.0.0.1", "--port", str(self._port), "--jetstream"]
        command += ["--store_dir", str(self._directory), "--ports_file_dir", str(ports)]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log)
        ends_at = time.monotonic() + START_SECONDS_MAX
        while not self._address(ports):
            assert time.monotonic() < ends_at, "the NATS server does not start"
            time.sleep(0.01)
        self._port = int(self._address(ports).rpartition(":")[2])

    def _address(self, ports: Path) -> str:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()
        try:
            return next(str(json.loads(each.read_text())["nats"][0]) for each in ports.iterdir())
        except (StopIteration, ValueError):
            return ""

    def stop(self) -> None:
        """Kill it; what was acknowledged is in its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it not respond any more, with its connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
