"""Redis: keys of every type go back, with their expiry, and only those of the world."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from holdfast.errors import CheckpointInvalid, InvalidArgument
from holdfast.worlds import Observation, World, action, check_system, explore

redis = pytest.importorskip("redis")
from holdfast.worlds.systems.redis import RedisSystem  # noqa: E402
from tests.worlds.test_killed import check_kept  # noqa: E402

LATER_MS = 4_000_000_000_000


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
        yield client
        client.flushdb()


def change(client: Any, random: Random) -> str:
    key = random.choice([b"a", b"b", "é", b"\xff\x00", b"w:x"])
    value = str(random.randrange(5))
    steps: list[tuple[str, Callable[[], object]]] = [
        ("set", lambda: client.set(key, value)),
        ("set with expiry", lambda: client.set(key, value, pxat=LATER_MS + random.randrange(9))),
        ("persist", lambda: client.persist(key)),
        ("delete", lambda: client.delete(key)),
        ("rename", lambda: client.exists(key) and client.rename(key, b"renamed")),
        ("list", lambda: of_type(client, "list", key) and client.rpush(key, value, "x")),
        ("hash", lambda: of_type(client, "hash", key) and client.hset(key, value, random.random())),
        ("set members", lambda: of_type(client, "set", key) and client.sadd(key, value, "m")),
        ("sorted", lambda: of_type(client, "zset", key) and client.zadd(key, {value: 0.5})),
        ("stream", lambda: of_type(client, "stream", key) and client.xadd(key, {"v": value})),
        ("script", lambda: client.eval("redis.call('SET', KEYS[1], 'lua')", 1, key)),
        ("many", lambda: client.mset({f"many {n}": value for n in range(20)})),
        ("flush", lambda: random.random() < 0.2 and client.flushdb()),
    ]  # fmt: skip
    name, run = random.choice(steps)
    run()
    return f"{name} {key!r}"


def of_type(client: Any, kind: str, key: Any) -> bool:
    if client.type(key) != kind.encode():
        client.delete(key)
    return True


READS: dict[bytes, Callable[[Any, bytes], object]] = {
    b"string": lambda client, key: client.get(key),
    b"list": lambda client, key: client.lrange(key, 0, -1),
    b"hash": lambda client, key: client.hgetall(key),
    b"set": lambda client, key: client.smembers(key),
    b"zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    b"stream": lambda client, key: client.xrange(key),
}


def content(client: Any) -> dict[bytes, list[object]]:
    kinds = {key: client.type(key) for key in client.scan_iter()}
    return {
        key: [kind, READS[kind](client, key), client.pttl(key) >= 0] for key, kind in kinds.items()
    }


@pytest.mark.parametrize("seed", range(2))
def test_a_rollback_restores_keys_of_every_type(client: Any, redis_url: str, seed: int) -> None:
    client.set("before", 1)
    system = RedisSystem(redis_url)
    check_system(system, lambda random: change(client, random), lambda: content(client), seed=seed)
    system.close()


def test_expiry_is_restored_as_the_same_moment(client: Any, redis_url: str) -> None:
    system = RedisSystem(redis_url)
    client.set("k", "v", pxat=LATER_MS)
    token = system.checkpoint("expiring")
    client.persist("k")
    forever = system.checkpoint("forever")
    system.rollback(token)
    moment = now_ms(client) + client.pttl("k")
    assert abs(moment - LATER_MS) < 1_000
    system.rollback(forever)
    assert client.pttl("k") == -1
    system.close()


def test_a_key_that_expired_stays_away_even_if_the_server_has_not_noticed(
    client: Any, redis_url: str
) -> None:
    system = RedisSystem(redis_url)
    client.execute_command("DEBUG", "SET-ACTIVE-EXPIRE", "0")
    try:
        milliseconds = 200
        while True:
            client.set("short", "v", px=milliseconds)
            client.set("long", "v")
            token = system.checkpoint("both")
            shown = observed(system)
            if b"short" in shown:
                break
            # This machine was too slow to see it before it expired.
            milliseconds *= 2
            assert milliseconds < 60_000
        ends_at = now_ms(client) + milliseconds + 50
        while now_ms(client) < ends_at:
            pass
        assert set(shown) == {b"short", b"long"}
        assert set(system._pending()) == {b"short"}
        assert set(observed(system)) == {b"long"}
        client.delete("long")
        system.rollback(token)
        assert client.keys() == [b"long"]
        assert observed(system) == {b"long": [b"string", b"v"]}
    finally:
        client.execute_command("DEBUG", "SET-ACTIVE-EXPIRE", "1")
    system.close()


def now_ms(client: Any) -> int:
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def test_a_restored_key_is_not_taken_for_changed_if_it_is_dumped_in_other_bytes(
    client: Any, redis_url: str
) -> None:
    """The order of a large set depends on its history."""
    client.sadd("k", *(f"member {n}" for n in range(2_000)))
    client.srem("k", *(f"member {n}" for n in range(1_000)))
    system = RedisSystem(redis_url)
    token = system.checkpoint("large")
    dump = client.dump("k")
    client.delete("k")
    system.rollback(token)
    assert client.dump("k") != dump
    assert system._pending() == {}
    system.rollback(token)
    assert client.scard("k") == 1_000
    system.close()


def observed(system: RedisSystem) -> dict[bytes, object]:
    seen = system.observe()
    assert isinstance(seen, Observation)
    found: dict[bytes, object] = seen.data
    return found


def test_only_keys_with_the_prefix_are_touched(client: Any, redis_url: str) -> None:
    client.mset({"w[1]:a": 1, "other": 1})
    system = RedisSystem(redis_url, prefix="w[1]:")
    token = system.checkpoint("start")
    client.mset({"w[1]:a": 2, "w[1]:b": 2, "other": 2, "new": 2})
    system.rollback(token)
    assert {key: client.get(key) for key in client.scan_iter()} == {
        b"w[1]:a": b"1", b"other": b"2", b"new": b"2",
    }  # fmt: skip
    assert set(observed(system)) == {b"w[1]:a"}
    system.close()


def test_a_key_of_another_database_is_not_taken_for_ones_own(client: Any, redis_url: str) -> None:
    client.set("k", "zero")
    system = RedisSystem(redis_url)
    token = system.checkpoint("start")
    with redis.Redis.from_url(redis_url, db=1) as other:
        other.set("k", "one")
        other.set("only there", "one")
        assert system._pending() == {}
        system.rollback(token)
        assert other.get("k") == b"one"
        other.flushdb()
    assert client.get("k") == b"zero"
    system.close()


def test_changes_while_the_reporting_connection_was_lost_are_found(
    client: Any, redis_url: str
) -> None:
    system = RedisSystem(redis_url)
    client.set("k", 1)
    token = system.checkpoint("start")
    client.client_kill_filter(_type="normal", skipme=True)
    client.set("k", 2)
    client.set("new", 2)
    system.rollback(token)
    assert content(client) == {b"k": [b"string", b"1", False]}
    system.close()


def test_only_changed_keys_are_read(client: Any, redis_url: str) -> None:
    client.mset({f"key {n}": n for n in range(1_000)})
    system = RedisSystem(redis_url)
    token = system.checkpoint("start")
    client.mset({"key 1": "x", "key 2": "x"})

    def calls() -> int:
        return int(client.info("commandstats")["cmdstat_dump"]["calls"])

    before = calls()
    system.checkpoint("two")
    assert calls() == before + 2
    system.rollback(token)
    assert client.get("key 1") == b"1"
    assert calls() <= before + 6
    system.close()


@pytest.fixture
def unreported_url(client: Any, redis_url: str) -> Iterator[str]:
    """The address of a user to whom the server reports no changes."""
    client.acl_setuser(
        "deaf", enabled=True, passwords=["+x"], keys=["*"], categories=["+@all"],
        commands=["-client"], reset=True,
    )  # fmt: skip
    yield f"{redis_url}{'&' if '?' in redis_url else '?'}username=deaf&password=x"
    client.acl_deluser("deaf")


def test_without_reports_every_key_is_read_and_a_warning_says_so(
    client: Any, unreported_url: str
) -> None:
    client.set("before", 1)
    with pytest.warns(UserWarning, match=r"refuses to report changes.*reads every key"):
        system = RedisSystem(unreported_url)
    check_system(system, lambda random: change(client, random), lambda: content(client), seed=1)
    client.set("after", 2)
    assert observed(system)[b"after"] == [b"string", b"2"]
    assert observed(system).keys() == content(client).keys()
    system.close()


def test_a_server_that_forgets_to_report_is_noticed_at_the_start(
    client: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisSystem, "_hear", lambda self, message: None)
    with pytest.warns(UserWarning, match="does not report which keys change"):
        system = RedisSystem(redis_url)
    token = system.checkpoint("start")
    client.set("k", 1)
    system.rollback(token)
    assert content(client) == {}
    system.close()


def test_many_writers_are_reported_without_a_miss(client: Any, redis_url: str) -> None:
    system = RedisSystem(redis_url)
    token = system.checkpoint("empty")

    def write(number: int) -> None:
        with redis.Redis.from_url(redis_url) as own:
            for n in range(50):
                own.set(f"{number} {n}", n)

    for _ in range(5):
        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(system._pending()) == 200
        system.rollback(token)
        assert client.dbsize() == 0
    system.close()


def test_an_exploration_leaves_the_keys_and_no_connection(client: Any, redis_url: str) -> None:
    client.set("at", 0)

    @action(parameters={"by": [-1, 1, 3]})
    def move(world: World, by: int) -> None:
        client.set("at", (int(client.get("at")) + by) % 8)

    @action
    def reset(world: World) -> None:
        client.set("at", 0)

    with World({"cache": RedisSystem(redis_url)}, verify=True) as world:
        result = explore(world, [move, reset])
        assert result.is_complete
        assert len(result.graph.states) == 8
        assert result.leaks == ()
    assert content(client) == {b"at": [b"string", b"0", False]}
    assert not [each for each in client.client_list() if each["flags"].startswith("t")]


def test_bad_tokens_and_arguments_are_refused(client: Any, redis_url: str) -> None:
    system = RedisSystem(redis_url, observe=lambda own: own.dbsize())
    assert system.observe() == 0
    with pytest.raises(CheckpointInvalid):
        system.prepare(99)
    system.close()
    with pytest.raises(InvalidArgument):
        RedisSystem(redis_url, prefix=b"bytes")  # type: ignore[arg-type]


def test_what_a_killed_process_kept_is_restored_exactly(
    client: Any, redis_url: str, tmp_path: Path
) -> None:
    check_kept("redis", redis_url, tmp_path)
    assert sorted(client.keys()) == [b"only 1", b"only 2", b"same", b"sorted"]
    assert client.pttl("only 1") > 0
