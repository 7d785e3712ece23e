"""Stand-ins for services, in memory: a queue, mail, object storage and a clock."""

from __future__ import annotations

from typing import Any

from ...arguments import require_seconds, require_text
from ...errors import InvalidArgument, KeyNotFound, NotFound
from ..system import System
from ..values import decode, encode
from .memory import MemorySystem

_SECONDS_MAX = 10**10
_START_MS = 1_800_000_000_000


class QueueSystem(MemorySystem):
    """Queues in memory: messages are received in order, and stay until they are acknowledged."""

    not_covered = ("subscribers that hold a message in memory",)

    def __init__(self) -> None:
        super().__init__({"next_id": 1, "ready": {}, "in_flight": {}})

    def publish(self, queue: str, body: Any) -> int:
        """Add a message to a queue and return its id."""
        require_text("queue", queue)
        encode(body, "body")
        number = int(self.data["next_id"])
        self.data["next_id"] = number + 1
        self.data["ready"].setdefault(queue, []).append({"id": number, "body": body})
        return number

    def receive(self, queue: str) -> tuple[int, Any] | None:
        """Take the oldest message of a queue and return its id and body; None if it is empty."""
        waiting = self.data["ready"].get(queue)
        if not waiting:
            return None
        message = waiting.pop(0)
        if not waiting:
            del self.data["ready"][queue]
        self.data["in_flight"][message["id"]] = {"queue": queue, "body": message["body"]}
        return message["id"], message["body"]

    def acknowledge(self, id: int) -> None:
        """Remove a received message."""
        self._taken(id)

    def reject(self, id: int) -> None:
        """Put a received message back at the front of its queue."""
        message = self._taken(id)
        waiting = self.data["ready"].setdefault(message["queue"], [])
        waiting.insert(0, {"id": id, "body": message["body"]})

    def messages(self, queue: str) -> list[Any]:
        """Return the bodies of the messages in a queue, oldest first."""
        return [message["body"] for message in self.data["ready"].get(queue, ())]

    def observe(self) -> object:
        """Return the messages without their ids, so that states can repeat."""
        ready = {queue: self.messages(queue) for queue in self.data["ready"]}
        seen = {"ready": ready, "in_flight": list(self.data["in_flight"].values())}
        return decode(encode(seen, "data"))

    def _taken(self, id: int) -> Any:
        try:
            return self.data["in_flight"].pop(id)
        except KeyError:
            raise NotFound(f"No message {id} waits for an acknowledgement.", id=id) from None


class MailSystem(MemorySystem):
    """Mail in memory: the messages sent, by recipient."""

    not_covered = ()

    def __init__(self) -> None:
        super().__init__({"sent": []})

    def send(self, to: str, subject: str, body: str = "") -> None:
        """Send a message."""
        require_text("to", to)
        self.data["sent"].append({"to": to, "subject": subject, "body": body})

    def inbox(self, to: str) -> list[dict[str, str]]:
        """Return copies of the messages to a recipient, oldest first."""
        return [dict(message) for message in self.data["sent"] if message["to"] == to]

    @property
    def sent(self) -> list[dict[str, str]]:
        """Copies of all messages, oldest first."""
        return [dict(message) for message in self.data["sent"]]


class ClockSystem(MemorySystem):
    """A clock that stands still until it is advanced: pass its `now_ms` to the code under test."""

    not_covered = ("timers that wait for the machine's own clock",)

    def __init__(self, now_ms: int = _START_MS) -> None:
        super().__init__({"now_ms": now_ms})

    def now_ms(self) -> int:
        """Return the time in milliseconds UTC."""
        return int(self.data["now_ms"])

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.data["now_ms"] += require_seconds("seconds", seconds, _SECONDS_MAX)


class StorageSystem(System):
    """Objects in memory: bytes by name. A checkpoint copies the names, not the bytes."""

    is_in_process = True
    is_atomic = True
    is_interruptible = True

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, str]] = {}

    def put(
        self, name: str, content: bytes, *, media_type: str = "application/octet-stream"
    ) -> None:
        """Store an object, replacing an existing one."""
        require_text("name", name, 1_024)
        if not isinstance(content, bytes):
            raise InvalidArgument(f"content must be bytes, not a {type(content).__name__}")
        self._objects[name] = content, media_type

    def get(self, name: str) -> bytes:
        """Return the bytes of an object."""
        return self._found(name)[0]

    def media_type(self, name: str) -> str:
        """Return the media type of an object."""
        return self._found(name)[1]

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""
        self._objects.pop(name, None)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin with a prefix, in order."""
        return sorted(name for name in self._objects if name.startswith(prefix))

    def checkpoint(self, name: str) -> dict[str, tuple[bytes, str]]:
        """Return the objects by name; bytes never change, so they are shared."""
        return dict(self._objects)

    def rollback(self, token: dict[str, tuple[bytes, str]]) -> None:
        """Restore the objects of a checkpoint."""
        self._objects = dict(token)

    def keep(self, token: dict[str, tuple[bytes, str]]) -> object:
        """Return the objects, which are valid in every process."""
        return token

    def restore(self, kept: dict[str, tuple[bytes, str]]) -> None:
        """Restore the objects of a checkpoint."""
        self.rollback(kept)

    def observe(self) -> object:
        """Return the objects with their media types."""
        return dict(self._objects)

    def _found(self, name: str) -> tuple[bytes, str]:
        try:
            return self._objects[name]
        except KeyError:
            raise KeyNotFound(f"There is no object {name!r}.", key=name) from None
