"""Every system: 300 random changes, checkpoints and rollbacks, compared with a copy of its own."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from holdfast.errors import InvalidArgument, InvalidValue, NotFound
from holdfast.worlds import (
    ClockSystem,
    MailSystem,
    MemorySystem,
    QueueSystem,
    StorageSystem,
    System,
    check_system,
)
from tests.worlds.systems import Stack

Change = Callable[[Random], object]


def memory() -> tuple[System, Change, Callable[[], object]]:
    system = MemorySystem({"rows": {}, "log": []})

    def change(random: Random) -> object:
        key = random.randrange(5)
        match random.randrange(4):
            case 0:
                system.data["rows"][key] = {"n": random.random(), "tags": {"a", key}}
            case 1:
                system.data["rows"].pop(key, None)
            case 2:
                system.data["log"].append(bytes([key]))
            case _:
                system.data[f"key {key}"] = (key, None, True)
        return key

    # The order of rows is part of what a rollback restores.
    return system, change, lambda: [list(system.data.items()), list(system.data["rows"])]


def queue() -> tuple[System, Change, Callable[[], object]]:
    system = QueueSystem()
    taken: list[int] = []

    def change(random: Random) -> object:
        name = random.choice("ab")
        received = system.receive(name) if random.random() < 0.5 else None
        if received is None:
            return system.publish(name, {"n": random.randrange(9)})
        finish = random.choice([system.acknowledge, system.reject, taken.append])
        finish(received[0])
        return finish.__name__

    return system, change, lambda: system.data


def mail() -> tuple[System, Change, Callable[[], object]]:
    system = MailSystem()

    def change(random: Random) -> object:
        system.send(random.choice(["a@x", "b@x"]), f"subject {random.randrange(9)}")
        return "send"

    return system, change, lambda: [system.sent, system.inbox("a@x")]


def storage() -> tuple[System, Change, Callable[[], object]]:
    system = StorageSystem()

    def change(random: Random) -> object:
        name = random.choice(["a/1", "a/2", "b"])
        if random.random() < 0.3:
            system.delete(name)
        else:
            system.put(name, random.randbytes(9), media_type="text/plain")
        return name

    return (
        system,
        change,
        lambda: {name: [system.get(name), system.media_type(name)] for name in system.names()},
    )


def clock() -> tuple[System, Change, Callable[[], object]]:
    system = ClockSystem()
    return system, lambda random: system.advance(random.randrange(100)), system.now_ms


def stack() -> tuple[System, Change, Callable[[], object]]:
    system = Stack()

    def change(random: Random) -> object:
        system.data[random.choice("abc")] = random.randrange(9)
        return dict(system.data)

    return system, change, lambda: dict(system.data)


@pytest.mark.parametrize("make", [memory, queue, mail, storage, clock, stack])
@pytest.mark.parametrize("seed", range(3))
def test_a_rollback_restores_what_was_there(
    make: Callable[[], tuple[System, Change, Callable[[], object]]], seed: int
) -> None:
    system, change, content = make()
    check_system(system, change, content, seed=seed)


class Lying(MemorySystem):
    """Forgets one key when it rolls back."""

    def rollback(self, token: bytes) -> None:
        super().rollback(token)
        self.data.pop("a", None)


def test_the_suite_finds_a_system_that_does_not_keep_its_promise() -> None:
    system = Lying()

    def change(random: Random) -> object:
        system.data[random.choice("abc")] = random.randrange(9)
        return "set"

    with pytest.raises(AssertionError, match="the content differs after"):
        check_system(system, change, lambda: dict(system.data))


def test_the_suite_finds_observations_that_differ_without_a_change() -> None:
    class Restless(MemorySystem):
        def observe(self) -> object:
            self.data["seen"] = self.data.get("seen", 0) + 1
            return dict(self.data)

    with pytest.raises(AssertionError, match="two observations differ"):
        check_system(Restless(), lambda random: None, lambda: 0)


def test_the_content_of_memory_is_replaced_in_place_and_checked() -> None:
    system = MemorySystem({"a": 1})
    data = system.data
    token = system.checkpoint("x")
    data["b"] = object()
    with pytest.raises(InvalidValue, match=r"data\.b is a object"):
        system.checkpoint("y")
    system.rollback(token)
    assert system.data is data
    assert data == {"a": 1}


def test_messages_are_received_in_order_until_acknowledged() -> None:
    system = QueueSystem()
    first, second = system.publish("jobs", 1), system.publish("jobs", 2)
    assert system.receive("jobs") == (first, 1)
    assert system.messages("jobs") == [2]
    system.reject(first)
    assert system.messages("jobs") == [1, 2]
    assert system.receive("jobs") == (first, 1)
    system.acknowledge(first)
    with pytest.raises(NotFound):
        system.acknowledge(first)
    assert system.receive("jobs") == (second, 2)
    assert system.receive("jobs") is None
    system.acknowledge(second)
    # Ids do not count: the queue is as empty as a new one.
    assert system.observe() == QueueSystem().observe()


def test_objects_are_stored_and_refused_as_bytes() -> None:
    system = StorageSystem()
    with pytest.raises(InvalidArgument, match="must be bytes"):
        system.put("a", "text")  # type: ignore[arg-type]
    with pytest.raises(NotFound):
        system.get("a")
    system.put("a/1", b"one")
    system.put("b", b"two")
    assert system.names("a/") == ["a/1"]
    system.delete("a/1")
    system.delete("a/1")
    assert system.names() == ["b"]
