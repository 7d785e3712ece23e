"""What every transport promises: messages come at least once, and go to one receiver at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.mesh import Memory, Message, Undeliverable
from tests.mesh.meshes import until

Make = Callable[..., Any]


@pytest.fixture(params=["memory", "nats"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes transports that reach each other."""
    if request.param == "nats":
        found: Make = request.getfixturevalue("make_nats")
        return found
    shared: list[Memory] = []

    def make(**given: Any) -> Memory:
        if not shared:
            shared.append(Memory(**given))
        return shared[0]

    return make


def message(number: int, **given: Any) -> Message:
    whole: dict[str, Any] = {"kind": "request", "id": f"m {number}", "store_id": "s", "ask_id": "a"}
    return Message(**{**whole, "number": number, **given})


def received(transport: Any, address: str = "agent:a", limit: int = 10) -> list[Any]:
    found: list[Any] = []

    def is_received() -> bool:
        found.extend(transport.receive(address, limit, 0.5))
        return bool(found)

    until(is_received, "no message comes")
    return found


def test_a_message_arrives_whole(make: Make) -> None:
    transport = make()
    sent = message(7, body=b"\x00\xff", headers={"Authorization": "Bearer ä"}, ask_id="ask / 7 é")
    transport.send("agent:a", sent)
    [delivery] = received(transport)
    assert delivery.message == sent
    delivery.ack()


def test_an_address_may_be_any_name(make: Make) -> None:
    transport = make()
    names = ["agent:a.b", "agent:a b", "agent:*", "agent:>", f"agent:{'é' * 200}", "store:a.b"]
    for number, name in enumerate(names):
        transport.send(name, message(number))
    for number, name in enumerate(names):
        [delivery] = received(transport, name)
        assert delivery.message.number == number
        delivery.ack()


def test_receivers_of_an_address_share_its_messages(make: Make) -> None:
    one, two = make(), make()
    for number in range(20):
        one.send("agent:a", message(number))
    numbers: list[int] = []
    while len(numbers) < 20:
        for transport in (one, two):
            for delivery in received(transport, limit=1):
                numbers.append(delivery.message.number)
                delivery.ack()
    assert sorted(numbers) == list(range(20))
    assert list(one.receive("agent:a", 10, 0.1)) == []


def test_a_message_that_nobody_receives_waits(make: Make) -> None:
    make().send("agent:later", message(1))
    assert list(make().receive("agent:other", 1, 0.05)) == []
    [delivery] = received(make(), "agent:later")
    delivery.ack()


def test_what_is_not_acknowledged_in_time_comes_again(make: Make) -> None:
    transport = make(ack_seconds=0.3)
    transport.send("agent:a", message(1))
    [first] = received(transport)
    [again] = received(transport)
    assert again.message == first.message
    again.ack()


def test_what_is_refused_comes_again_to_any_receiver(make: Make) -> None:
    transport = make()
    transport.send("agent:a", message(1))
    [first] = received(transport)
    first.nack()
    [again] = received(make())
    again.nack(0.1)
    [last] = received(transport)
    last.ack()
    assert list(transport.receive("agent:a", 1, 0.1)) == []


def test_an_extension_keeps_a_message_from_other_receivers(make: Make) -> None:
    transport = make(ack_seconds=4)
    transport.send("agent:a", message(1))
    [delivery] = received(transport)
    stopped = threading.Event()

    def extend() -> None:
        while not stopped.wait(0.5):
            delivery.extend()

    extending = threading.Thread(target=extend)
    extending.start()
    try:
        assert list(make().receive("agent:a", 1, 6)) == []
    finally:
        stopped.set()
        extending.join()
    delivery.ack()


def test_receiving_ends_when_a_message_comes(make: Make) -> None:
    transport = make()
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.extend(transport.receive("agent:a", 1, 120)))
    waiting.start()
    make().send("agent:a", message(1))
    waiting.join(60)
    assert [each.message.number for each in found] == [1]
    found[0].ack()


def test_a_message_that_is_too_large_for_the_broker_is_refused_for_good(
    make_nats: Callable[..., Any],
) -> None:
    with pytest.raises(Undeliverable):
        make_nats().send("agent:a", message(1, body=bytes(2 << 20)))


WRONG = [{"prefix": "a.b"}, {"prefix": ""}, {"ack_seconds": 0}, {"replicas": 0}, {"servers": ""}]


@pytest.mark.parametrize("given", WRONG)
def test_settings_of_nats_that_cannot_be_are_refused(given: Any) -> None:
    from holdfast.mesh.nats import Nats

    with pytest.raises(holdfast.InvalidArgument):
        Nats(**given)
