"""NATS with faults: what is sent may be lost, come twice, or be overtaken."""

from __future__ import annotations

import threading

import msgspec

from holdfast.mesh import Message
from holdfast.mesh.nats import Nats


class FaultyNats(Nats):
    """Loses every tenth message, repeats every third, and holds every fifth back for a while."""

    name = "nats"

    def __init__(self, url: str, **given: float | str) -> None:
        super().__init__(url, **given)  # type: ignore[arg-type]
        self._faults = threading.Lock()
        self._sent = 0
        self._held: list[tuple[str, Message]] = []

    def send(self, address: str, message: Message) -> None:
        with self._faults:
            self._sent += 1
            number = self._sent
            # Under one id the server would drop copies; here the stores have to.
            copies = [
                msgspec.structs.replace(message, id=f"{message.id} {number} {i}") for i in (1, 2)
            ]
            sent = [(address, each) for each in copies[: 2 if number % 3 == 0 else 1]]
            if number % 10 == 0:
                return
            released, self._held = self._held, sent if number % 5 == 0 else []
        for each in (*([] if number % 5 == 0 else sent), *released):
            super().send(*each)
