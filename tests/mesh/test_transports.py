"""What every transport promises: messages come at least once, and go to one receiver at a time."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.mesh import Memory, Message, Undeliverable
from tests.mesh.meshes import until

Make = Callable[..., Any]
encode = msgspec.msgpack.encode


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
    transport = make_nats()
    transport.send("agent:a", message(1))
    connection = transport._open()._connection
    # With its headers, what the server accepts by default; the id is in both.
    headers = len(b"NATS/1.0\r\nNats-Msg-Id: m 1 \xc3\xa9\r\n\r\n")
    most = (1 << 20) - len(encode(message(1, id="m 1 é", body=bytes(70_000)))) - headers + 70_000
    for excess in (1, 2, 30, headers, headers + 1, 1 << 20):
        with pytest.raises(Undeliverable, match="max_payload"):
            transport.send("agent:a", message(1, id="m 1 é", body=bytes(most + excess)))
    transport.send("agent:a", message(1, id="m 1 é", body=bytes(most)))
    assert connection.stats["reconnects"] == 0
    assert {len(each.message.body) for each in received(transport)} == {0, most}


def test_a_message_that_is_too_large_for_its_stream_is_refused_for_good(
    make_nats: Callable[..., Any],
) -> None:
    transport = make_nats()
    transport._stream.max_msg_size = 1_000
    transport.send("agent:a", message(1))
    with pytest.raises(Undeliverable, match="max_msg_size"):
        transport.send("agent:a", message(2, body=bytes(1_000)))


def test_what_no_store_has_sent_is_ended_and_told_once_without_its_content(
    make_nats: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    transport = make_nats(ack_seconds=0.1)
    transport.send("agent:a", message(1))
    whole = encode(message(2, id="canary"))
    nested = b"\x91" * 100_000 + b"\x90"
    forged = [b"", b"\xc1", b"canary", b"\x80", encode(["canary"]), whole[:-1], nested]
    forged += [b"\x81\xa4kind" + nested, b"\xdf\xff\xff\xff\xff", whole.replace(b"can", b"c\xff")]
    forged += [whole.replace(b"request", b"unheard"), whole.replace(b"\xa4kind", b"\xa4sort")]
    lines = transport._open()

    async def publish(payload: bytes) -> None:
        await (await lines._ready()).publish(transport._subject("agent:a"), payload)

    for each in forged:
        lines.run(publish(each), 60)
    transport.send("agent:a", message(3))
    found: list[int] = []

    def is_received() -> bool:
        for each in transport.receive("agent:a", 100, 0.5):
            found.append(each.message.number)
            each.ack()
        return 3 in found

    async def left() -> int:
        jetstream = await lines._ready()
        return int((await jetstream.stream_info(transport._stream.name)).state.messages)

    until(is_received, "the last does not come")
    until(lambda: lines.run(left(), 60) == 0, "something is left")
    assert set(found) == {1, 3}
    assert caplog.text.count("is not one of Holdfast's") == len(forged)
    assert "canary" not in caplog.text


SECRET = "s3cr"
ADDRESSES: list[Any] = [
    f"nats://user:{SECRET}@host:4222\n",
    f"nats://user:{SECRET}/{SECRET}@host",
    f"nats://user:{SECRET}?{SECRET}@host",
    f"nats://user:{SECRET}?a={SECRET}@host",
    f"nats://user:{SECRET}#{SECRET}@host",
    f"nats://user:{SECRET}#{SECRET}",
    f"nats://user:{SECRET}[@host",
    f"nats://user:{SECRET}\u2100@host",
    f"nats://user:{SECRET}@host:port{SECRET}",
    f"nats://{SECRET}@host/{SECRET}",
    f"nats://a:{SECRET}@one:4222,nats://b:{SECRET}@two:4222",
    f"user:{SECRET}@host:4222",
    f"postgresql://user:{SECRET}@host/db",
    f"nats://user:{SECRET}@",
    SECRET,
    SECRET * 1_000,
    SECRET.encode(),
    None,
    [],
]


@pytest.mark.parametrize("address", ADDRESSES, ids=range(len(ADDRESSES)))
def test_an_address_that_is_refused_is_not_repeated_as_it_may_hold_a_password(address: Any) -> None:
    from holdfast.mesh.nats import Nats

    for make in (Nats, Nats.at, lambda each: Nats(["nats://first:4222", each])):
        with pytest.raises(holdfast.InvalidArgument) as refused:
            make(address)
        assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "address",
    ["nats://u:p%40@h", "nats://u:p@p@h:1", "nats://token@h", "tls://h", "nats://[::1]:4222/"],
)
def test_addresses_with_users_tokens_and_ports_are_accepted(address: str) -> None:
    from holdfast.mesh.nats import Nats

    assert repr(Nats.at(address + "?prefix=p")) == repr(Nats([address], prefix="p")) == "<Nats p>"


WRONG = [{"prefix": "a.b"}, {"prefix": ""}, {"ack_seconds": 0}, {"replicas": 0}, {"servers": ""}]


@pytest.mark.parametrize("given", WRONG)
def test_settings_of_nats_that_cannot_be_are_refused(given: Any) -> None:
    from holdfast.mesh.nats import Nats

    with pytest.raises(holdfast.InvalidArgument):
        Nats(**given)
