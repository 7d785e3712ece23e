"""Who waits is woken at once, and not for every change while they come fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

import holdfast
from holdfast.kernel.postgres.followers import LOOK_SECONDS, OtherListeners
from holdfast.kernel.postgres.notify import COALESCE_SECONDS, HELLO, SEPARATOR
from holdfast.kernel.signals import EVERY_TREE
from holdfast.testing.proxy import PostgresProxy
from tests.work.fleet import wait_until
from tests.work.working import SECONDS_MAX


def listen(listener: psycopg.Connection[Any], namespace: str) -> None:
    """Listen as another process does."""
    listener.execute(OtherListeners(namespace).announcement.made.encode())
    listener.execute(f'LISTEN "holdfast_{namespace}"'.encode())


def payloads(listener: psycopg.Connection[Any]) -> Iterator[str]:
    """What is heard but the greeting of whoever begins to listen."""
    for note in listener.notifies(timeout=SECONDS_MAX):
        if note.payload != HELLO:
            yield note.payload


def test_rings_that_come_fast_are_sent_together(postgres_dsn: str, namespace: str) -> None:
    with (
        holdfast.open(postgres_dsn, namespace=namespace) as store,
        psycopg.connect(postgres_dsn, autocommit=True) as listener,
    ):
        listen(listener, namespace)
        signals = store.runtime.signals
        signals.ring("first")
        assert next(payloads(listener)) == "first"
        began = time.monotonic()
        for _ in range(2_000):
            signals.ring("topic")
        signals.ring("zzz")
        heard: list[str] = []
        for payload in payloads(listener):
            heard += payload.split(SEPARATOR)
            if heard[-1] == "zzz":
                break
        bursts = (time.monotonic() - began) / COALESCE_SECONDS + 2
        assert 1 <= heard.count("topic") <= bursts


def test_many_rings_share_notifications_and_all_arrive(postgres_dsn: str, namespace: str) -> None:
    topics = [f"{number} {'ü' * 1_500}" for number in range(20)]
    with (
        holdfast.open(postgres_dsn, namespace=namespace) as store,
        psycopg.connect(postgres_dsn, autocommit=True) as listener,
    ):
        listen(listener, namespace)
        signals = store.runtime.signals
        for topic in topics:
            signals.ring(topic)
        heard: set[str] = set()
        notifications = 0
        for payload in payloads(listener):
            notifications += 1
            heard.update(payload.split(SEPARATOR))
            if heard == set(topics):
                break
        assert heard == set(topics)
        assert notifications < len(topics)


def test_a_process_that_is_alone_sends_nothing_until_another_listens(
    postgres_dsn: str, namespace: str
) -> None:
    with (
        holdfast.open(postgres_dsn, namespace=namespace) as store,
        psycopg.connect(postgres_dsn, autocommit=True) as unannounced,
        psycopg.connect(postgres_dsn, autocommit=True) as listener,
    ):
        unannounced.execute(f'LISTEN "holdfast_{namespace}"'.encode())
        signals = store.runtime.signals
        signals.ring("nobody hears it")
        driver: Any = store.runtime.driver
        others = driver._notifier._wakeups.others
        until = time.monotonic() + SECONDS_MAX
        while others.may_be_there() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 100)
        for number in range(100):
            signals.ring(f"nor {number}")
        listen(listener, namespace)
        listener.execute("SELECT pg_notify(%s, %s)", [f"holdfast_{namespace}", HELLO])
        while not others.may_be_there() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 100)
        # It may have begun to listen before one of the rings that were withheld.
        assert next(payloads(listener)) == EVERY_TREE
        signals.ring("heard")
        assert next(payloads(listener)) == "heard"
        heard: set[str] = set()
        for note in unannounced.notifies(timeout=SECONDS_MAX):
            heard.add(note.payload)
            if note.payload == "heard":
                break
        assert heard == {HELLO, EVERY_TREE, "heard"}


def test_a_look_does_not_undo_what_was_heard_since_it_began() -> None:
    others = OtherListeners("any")
    times_heard = others.times_heard
    others.hear()
    others.note(False, times_heard)
    assert others.may_be_there()
    others.note(False, others.times_heard)
    assert not others.may_be_there()


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_change_before_a_process_knows_of_a_listener_wakes_it(
    is_cut: bool,
    proxy: PostgresProxy,
    postgres_dsn: str,
    ready_namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own connection is slow, or was cut; the other one listens and waits meanwhile."""
    monkeypatch.setattr("holdfast.kernel.postgres.followers.LOOK_SECONDS", 3_600.0)
    place: dict[str, Any] = {"url": postgres_dsn, "namespace": ready_namespace}
    slow = f"{postgres_dsn}&listen={quote(proxy.dsn(postgres_dsn), safe='')}"
    with holdfast.open(slow, namespace=ready_namespace) as writer:
        writer.work.submit("other")
        driver: Any = writer.runtime.driver
        wait_until(lambda: not driver._notifier._wakeups.others.may_be_there())
        proxy.freeze()
        if is_cut:
            proxy.cut_all()
        with holdfast.open(**place) as waiter:
            signals = waiter.runtime.signals
            # It is rung once when it listens, and then waits.
            assert signals.wait("work:t", signals.count("work:t"), SECONDS_MAX)
            seen = signals.count("work:t")
            writer.work.submit("t")
            assert signals.count("work:t") == seen
            proxy.thaw()
            assert signals.wait("work:t", seen, SECONDS_MAX)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_commit_elsewhere_wakes_who_waits_on_a_file(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Where the system tells of writes, and where it does not."""
    if not is_told:
        monkeypatch.setattr("holdfast.kernel.sqlite.watch._watch_writes", lambda path: -1)
    url = f"sqlite:///{tmp_path}/store.db"
    with holdfast.open(url) as here, holdfast.open(url) as there:
        signals = here.runtime.signals
        for number in range(5):
            seen = signals.count("work:t")
            submit = threading.Timer(0.02 * number, there.work.submit, ["t"])
            submit.start()
            assert signals.wait("work:t", seen, SECONDS_MAX)
            submit.join()
            assert len(here.work.claim("w", queues="t")) == 1
