"""A store knows its keys and is refused to who lacks them; JSON does not command a terminal."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.ciphers import AesGcm
from holdfast.errors import InvalidArgument, StoreError
from holdfast.kernel.operation import rows
from tests.maintenance import stores

LEDGERS = ("hf_effects", "hf_attempts", "hf_work", "hf_spend")
CANARY = "correct horse battery staple"
OLD, NEW, WRONG = bytes(range(32)), bytes(range(1, 33)), bytes(32)


def aes(current: str, **keys: bytes) -> AesGcm:
    return AesGcm(keys, current)


def open_at(place: dict[str, Any], **arguments: Any) -> holdfast.Store:
    return holdfast.open(**place, durability="normal", **arguments)


@pytest.mark.parametrize("cipher", [None, aes("old", old=WRONG), aes("new", new=NEW)])
def test_an_encrypted_store_is_refused_without_its_key(place: Any, cipher: AesGcm | None) -> None:
    with open_at(place, cipher=aes("old", old=OLD)) as store:
        store.session("s").save(a=1)
    with pytest.raises(StoreError, match="opened without its current key"):
        open_at(place, cipher=cipher)
    with pytest.raises(StoreError, match="opened without its current key"):
        asyncio.run(_open_async(place, cipher))
    with open_at(place, cipher=aes("old", old=OLD)) as store:
        assert store.find_session("s").at(1)["a"] == 1


async def _open_async(place: Any, cipher: AesGcm | None) -> None:
    await holdfast.aopen(**place, cipher=cipher)


def test_no_value_lies_in_an_encrypted_store_in_clear(place: Any) -> None:
    @holdfast.tool(effect="mutate")
    def pay(card: str) -> str:
        raise ConnectionError(card)

    cipher = aes("k", k=OLD)
    with open_at(place, cipher=cipher, redaction=holdfast.NoRedaction()) as store:
        session = store.session("s", metadata={"title": CANARY})
        session.save(plan=CANARY, transcript=[CANARY], data={"d": CANARY}, metadata={"m": CANARY})
        session.pin(1, CANARY)
        session.attest(1, {"evidence": CANARY})
        with pytest.raises(holdfast.Unresolved):
            session.call(pay, card=CANARY)
        (doubt,) = session.unresolved()
        store.resolve(doubt.id, holdfast.Landed(CANARY), by="ann", note=CANARY)
        store.once("key", lambda: CANARY, request=CANARY)
        session.spend("model", source="test", usd=0.5, details={"d": CANARY})
        item = store.work.submit("mail", CANARY, session=session)
        (claimed,) = store.work.claim("worker")
        claimed.progress(CANARY)
        claimed.fail(CANARY, retry=False)
        assert store.work.get(item.id).status == "failed"
        (again,) = store.work.claim("worker", queues=[store.work.submit("mail", CANARY).queue])
        again.complete(CANARY)

        def read(tx: holdfast.Transaction) -> holdfast.Op[list[str]]:
            found = []
            for table in (*stores.TABLES, *LEDGERS):
                if CANARY in repr((yield from rows(f"SELECT * FROM {table}"))):
                    found.append(table)
            return found

        assert store.run(read) == []


def test_rotation_adds_a_key_and_then_the_old_one_alone_is_not_enough(place: Any) -> None:
    with open_at(place, cipher=aes("old", old=OLD)) as store:
        store.session("s").save(a=1)
    with open_at(place, cipher=aes("new", old=OLD, new=NEW)) as store:
        store.find_session("s").save(a=2)
    with pytest.raises(StoreError, match="its current key"):
        open_at(place, cipher=aes("old", old=OLD))
    with open_at(place, cipher=aes("old", old=OLD, new=NEW)) as store:
        assert store.find_session("s").at(2)["a"] == 2


def test_a_plain_store_is_not_given_a_cipher_later(place: Any) -> None:
    with open_at(place):
        pass
    with open_at(place, cipher=aes("k", k=OLD)):
        pass
    with pytest.raises(StoreError, match="this store is encrypted"):
        open_at(place)


RECORDS: dict[str, Callable[[holdfast.Store], object]] = {
    "a session": lambda store: store.session("s"),
    "a work item": lambda store: store.work.submit("step"),
    "an effect": lambda store: store.once("key", lambda: 1),
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_plain_store_with_records_refuses_a_cipher(place: Any, record: str) -> None:
    with open_at(place) as store:
        RECORDS[record](store)
    with pytest.raises(StoreError, match="is not encrypted but was opened with a cipher"):
        open_at(place, cipher=aes("k", k=OLD))


NOTED = """
SELECT count(*) FROM pg_stat_activity
WHERE cardinality(pg_blocking_pids(pid)) > 0 AND strpos(query, %s) > 0
"""


@pytest.mark.parametrize("opened", ["sync", "async"])
def test_of_two_keys_that_are_noted_at_once_the_second_is_refused(
    namespace: str, postgres_dsn: str, opened: str
) -> None:
    place = {"url": postgres_dsn, "namespace": namespace}
    with open_at(place):
        pass
    ours, theirs = aes("ours", ours=OLD), aes("theirs", theirs=NEW)

    def open_ours() -> None:
        if opened == "sync":
            open_at(place, cipher=ours).close()
        else:
            asyncio.run(_open_async(place, ours))

    with (
        psycopg.connect(postgres_dsn) as other,
        psycopg.connect(postgres_dsn, autocommit=True) as look,
        ThreadPoolExecutor() as pool,
    ):
        note = f'INSERT INTO "{namespace}".hf_meta (name, value) VALUES (%s, %s)'
        other.execute(note, ["cipher_keys", theirs.fingerprints()[-1]])
        opening = pool.submit(open_ours)
        while not look.execute(NOTED, [namespace]).fetchall()[0][0]:
            assert not opening.done()
        other.commit()
        with pytest.raises(StoreError, match="opened without its current key"):
            opening.result()
    with open_at(place, cipher=theirs) as store:
        store.session("s")


def test_a_store_with_effects_is_refused_with_another_redactor_key(place: Any) -> None:
    key = b"a key of thirty-two bytes at least"
    with open_at(place, redaction=holdfast.Redactor(key=key)) as store:
        store.once("k", lambda: 1)
    for redaction in (None, holdfast.Redactor(key=key[::-1])):
        with pytest.raises(InvalidArgument, match="the effects of this store were identified with"):
            open_at(place, redaction=redaction)
    with open_at(place, redaction=holdfast.Redactor(key=key)) as store:
        assert store.once("k", lambda: 2).value == 1


@pytest.fixture
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys.json"
    keys = {"k": base64.b64encode(OLD).decode()}
    redactor = base64.b64encode(NEW).decode()
    path.write_text(json.dumps({"cipher": {"current": "k", "keys": keys}, "redactor": redactor}))
    path.chmod(0o600)
    monkeypatch.setenv("HOLDFAST_KEYS_FILE", str(path))
    return path


def test_the_command_line_takes_keys_from_a_file(tmp_path: Path, keys_file: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    redaction = holdfast.Redactor(key=NEW)
    with holdfast.open(url, cipher=aes("k", k=OLD), redaction=redaction) as store:
        store.session("secret session").save(a="hidden")
        store.once("k", lambda: 1)
    command = [sys.executable, "-m", "holdfast", "sessions", "list", "--json", "--url", url]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "secret session" in listed.stdout, listed.stderr
    keys_file.unlink()
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert listed.returncode == InvalidArgument.exit_code
    assert "No such file" in listed.stderr


@pytest.mark.parametrize("content", ["", "[]", '{"cipher": 5}', '{"cipher": {"keys": {}}}',
                                     '{"redactor": "?"}'])  # fmt: skip
def test_a_file_of_keys_that_is_none_is_refused_without_its_content(
    keys_file: Path, content: str
) -> None:
    keys_file.write_text(content)
    with pytest.raises(InvalidArgument, match="is not a valid key file"):
        holdfast.open("sqlite://")


def test_a_file_of_keys_that_others_can_read_is_refused(keys_file: Path) -> None:
    keys_file.chmod(0o640)
    with pytest.raises(InvalidArgument, match="other users can read"):
        holdfast.open("sqlite://")


def test_json_cannot_command_a_terminal(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    commanding = "a\x9b31m\x7f\u202eb\u2066\u200f\u2028ü"
    with holdfast.open(url) as store:
        store.session("s", metadata={"m": commanding})
    command = [sys.executable, "-m", "holdfast", "sessions", "list", "--json", "--url", url]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert all(line.isprintable() for line in listed.stdout.split("\n"))
    assert repr(commanding) in repr(json.loads(listed.stdout))
    assert "ü" in listed.stdout


def test_a_file_that_others_can_open_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.db"
    holdfast.open(f"sqlite:///{path}").close()
    assert caplog.text == ""
    path.chmod(0o644)
    holdfast.open(f"sqlite:///{path}").close()
    assert f"{path} is open to other users (mode 0644); run `chmod 600 {path}`" in caplog.text


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal", "-lock", "-turn"])
def test_a_symbolic_link_is_refused_and_what_it_names_is_left_alone(
    tmp_path: Path, suffix: str
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    url = f"sqlite:///{tmp_path}/linked/store.db"
    holdfast.open(url).close()
    other = tmp_path / "other"
    link = tmp_path / "real" / f"store.db{suffix}"
    link.unlink(missing_ok=True)
    link.symlink_to(other)
    with pytest.raises(StoreError, match="is a symbolic link"):
        holdfast.open(url)
    assert not other.exists()
