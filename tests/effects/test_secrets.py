"""Secrets that tools are given, return or fail with are in no file, no table and no log."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import Landed, NotDone

MARK = "a-harmless-word-that-must-be-found"
LETTERS = "q7Zk2Wm9Xt4Rb8Ln5Vc3Hd6Jf1Gs0Py"


def of(length: int, prefix: str = "", letters: str = LETTERS) -> str:
    return prefix + (letters * 8)[:length]


KEY = base64.b64encode(f"no key {LETTERS * 6}".encode()).decode()
SIGNED = f"eyJhbGciOiJIUzI1NiJ9.{of(40, 'eyJ')}.{of(43)}"
BASIC = base64.b64encode(f"ann:{of(20)}".encode()).decode()
# Each: a value as a tool would be given it, and the part of it that nobody may find.
SHAPES: dict[str, tuple[Any, str]] = {
    "aws key id": ("use AKIAQ7ZKWMXTRBLNVCHD now", "AKIAQ7ZKWMXTRBLNVCHD"),
    "aws secret": (f"aws_secret_access_key = {of(40, 'A')}", of(40, "A")),
    "google": (of(35, "AIza"), of(35, "AIza")),
    "azure": (f"AccountName=a;AccountKey={of(86, 'B')}==;Suffix=x", of(86, "B")),
    "github": (f"git clone with {of(36, 'ghp_')}", of(36, "ghp_")),
    "gitlab": (of(20, "glpat-"), of(20, "glpat-")),
    "slack": (f"xoxb-{'1234567890' * 4}", "1234567890" * 4),
    "stripe": ({"note": f"paid by {of(24, 'sk_live_')}"}, of(24, "sk_live_")),
    "openai": ([of(48, "sk-proj-")], of(48, "sk-proj-")),
    "anthropic": (of(95, "sk-ant-api03-"), of(95, "sk-ant-api03-")),
    "npm": (of(36, "npm_"), of(36, "npm_")),
    "private key": (
        f"-----BEGIN RSA PRIVATE KEY-----\n{KEY}\n-----END RSA PRIVATE KEY-----",
        KEY[40:100],
    ),
    "jwt": (f"token {SIGNED} is old", SIGNED),
    "bearer": (f"Authorization: Bearer {of(44, 'C')}", of(44, "C")),
    "basic": (f"Authorization: Basic {BASIC}", BASIC),
    "url": (f"postgresql://app:{of(14, 'D')}@db.example.com/app", of(14, "D")),
    "card": ("card 4242 4242 4242 4242 please", "4242 4242 4242 4242"),
    "card digits": ("5555555555554444", "5555555555554444"),
    "password by name": ({"login": {"password": of(17, "E")}}, of(17, "E")),
    "api key by name": ({"api_key": of(25, "F")}, of(25, "F")),
    "password in text": (f"host=a password={of(18, 'G')} user=b", of(18, "G")),
    "cookie": ({"Set-Cookie": f"sid={of(30, 'H')}; Path=/"}, of(30, "H")),
}


def plant(store: holdfast.Store, name: str, value: Any) -> None:
    """Let a secret pass through every way into the ledger."""
    session = store.session(f"of {name}")
    text = f"{MARK} {value}"

    def echo(given: Any) -> Any:
        return {"echo": given, "also": text}

    def fail(given: Any) -> None:
        raise NotDone(text)

    def doubt(given: Any) -> None:
        raise ValueError(text)

    session.call(holdfast.tool(effect="read", name="read")(echo), given=value)
    session.call(holdfast.tool(effect="write", name="write")(echo), given=value)
    done = session.call(holdfast.tool(effect="mutate", name="mutate")(echo), given=value)
    assert done.value["echo"] == value, "the caller gets what the tool returned"
    with pytest.raises(NotDone):
        session.call(holdfast.tool(effect="mutate", name="fail")(fail), given=value)
    with pytest.raises(holdfast.Unresolved) as parked:
        session.call(holdfast.tool(effect="mutate", name="doubt")(doubt), given=value)
    store.resolve(parked.value.effect_id, Landed({"found": value}), by="ann", note=text)
    cut_off = "x " * 4_990 + text
    begun = session.begin("elsewhere", {"given": value})
    assert not isinstance(begun, holdfast.Replay)
    begun.fail(cut_off)
    store.once(f"key of {name}", lambda: value, request={"given": value})
    _lose(store, session, name, value, text)


def _lose(
    store: holdfast.Store, session: holdfast.Session, name: str, value: Any, text: str
) -> None:
    """Report results and errors too late, so that they are kept aside."""

    def lose(what: str, end: Callable[[], Any]) -> None:
        def act(given: Any) -> Any:
            (effect,) = store.effects(session=session.id, tool=what, status="issued")
            rows = "UPDATE hf_effects SET fence = fence + 1 WHERE number = :number"
            run(store, rows, number=effect.number)
            return end()

        with pytest.raises(holdfast.LeaseLost):
            session.call(holdfast.tool(effect="mutate", name=what)(act), given=value)
        (effect,) = store.effects(session=session.id, tool=what)
        assert effect.late is not None

    def fail() -> None:
        raise NotDone(text)

    lose("late result", lambda: {"late": value, "text": text})
    lose("late error", fail)


def run(store: holdfast.Store, sql: str, **parameters: Any) -> Any:
    from holdfast.kernel.operation import rows

    def body(tx: holdfast.Transaction) -> Any:
        return (yield from rows(sql, **parameters))

    return store.run(body)


def stored(place: dict[str, str]) -> dict[str, bytes]:
    """Return all that the database keeps, by where it lies."""
    if place["url"].startswith("sqlite"):
        path = Path(place["url"].removeprefix("sqlite:///"))
        return {file.name: file.read_bytes() for file in path.parent.glob(f"{path.name}*")}
    found: dict[str, bytes] = {}
    with psycopg.connect(place["url"], autocommit=True) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name FROM information_schema.columns "
            "WHERE table_schema = %s",
            [place["namespace"]],
        ).fetchall()
        for table, column in columns:
            name = f'"{place["namespace"]}"."{table}"'
            values = connection.execute(f'SELECT "{column}" FROM {name}').fetchall()
            raw = [value for (value,) in values if value is not None]
            found[f"{table}.{column}"] = b"\n".join(
                value if isinstance(value, bytes) else str(value).encode() for value in raw
            )
    return found


def test_no_secret_is_found_in_the_database_or_the_logs(
    place: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with holdfast.open(**place) as store:  # type: ignore[arg-type]
        for name, (value, _) in SHAPES.items():
            plant(store, name, value)
        found = stored(place)
    for more, kept in stored(place).items():
        found[f"{more} when closed"] = kept
    assert sum(kept.count(MARK.encode()) for kept in found.values()) > len(SHAPES) * 5
    if place["url"].startswith("sqlite"):
        assert any(name.endswith("-wal") and kept for name, kept in found.items())
    for name, (_, secret) in SHAPES.items():
        for where, kept in {**found, "log": caplog.text.encode()}.items():
            # Half of it would do for a guess.
            for part in (secret, secret[: len(secret) // 2 + 4], secret[-12:]):
                assert part.encode() not in kept, f"{name} lies in {where}"


def test_an_error_is_cut_only_after_its_secrets_are_out(place: dict[str, str]) -> None:
    secret = of(36, "ghp_")
    with holdfast.open(**place) as store:  # type: ignore[arg-type]
        session = store.session("s")
        begun = session.begin("act", {})
        assert not isinstance(begun, holdfast.Replay)
        begun.fail("x" * 9_980 + f" {secret}")
        (effect,) = session.unresolved()
        assert effect.error is not None
        assert effect.error.startswith("xxx")
        assert secret[:12] not in effect.error


def remark(store: holdfast.Store, text: str) -> None:
    """Write a text wherever a person says why."""
    session = store.session("remarks", agent="planner")
    session.save(plan="x")
    session.pin(1, text)
    session.state.set("key", 1, reason=text)
    for decide in (store.approve, store.reject):
        waiting = store.session(decide.__name__, agent="planner")
        decide(waiting.wait_for_approval(text).pause_id, by="ann", note=text)
    store.work.submit("step", session=session)
    (item,) = store.work.claim("worker", queues="step")
    item.progress(text)
    store.work.release(item.id, reason=text)
    attempt = session.spend("model", state="uncertain", usd="0.5")
    store.correct_spend(attempt.id, usd="0.1", by="ann", note=text)
    ask = store.session("asking", agent="planner").ask("researcher", {"question": "x"})
    store.progress(ask.id, text)


@pytest.mark.parametrize("redaction", [None, holdfast.NoRedaction()])
def test_what_people_remark_is_stored_without_secrets(
    place: dict[str, Any], redaction: holdfast.NoRedaction | None
) -> None:
    secret = of(36, "ghp_")
    with holdfast.open(**place, redaction=redaction) as store:
        remark(store, f"{MARK} {secret}")
        kept = b"".join(stored(place).values())
    assert kept.count(MARK.encode()) >= 9
    assert (secret.encode() in kept) == (redaction is not None)


def test_no_secret_is_found_after_async_calls(
    place: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with await holdfast.aopen(**place) as store:  # type: ignore[arg-type]
            session = await store.session("s")
            for name, (value, _) in SHAPES.items():

                async def echo(given: Any) -> Any:
                    return {"echo": given, "mark": MARK}

                def fail(given: Any) -> None:
                    raise ValueError(f"{MARK} {given}")

                await session.call(holdfast.tool(name=f"echo {name}")(echo), given=value)
                with pytest.raises(holdfast.Unresolved):
                    await session.call(holdfast.tool(name=f"fail {name}")(fail), given=value)

    asyncio.run(main())
    found = {**stored(place), "log": caplog.text.encode()}
    assert any(MARK.encode() in kept for kept in found.values())
    for name, (_, secret) in SHAPES.items():
        for where, kept in found.items():
            assert secret.encode() not in kept, f"{name} lies in {where}"


def test_the_search_finds_each_of_them_where_nothing_is_taken_out(place: dict[str, Any]) -> None:
    assert len(SHAPES) >= 20
    with holdfast.open(**place, redaction=holdfast.NoRedaction()) as store:
        for name, (value, _) in SHAPES.items():
            plant(store, name, value)
    kept = b"".join(stored(place).values())
    assert [name for name, (_, secret) in SHAPES.items() if secret.encode() not in kept] == []
