"""A step of the wall clock neither ends a live lease nor prolongs a dead one, on SQLite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import VirtualClock, clock
from holdfast.cli.app import run
from holdfast.kernel.operation import one
from tests.crash.children import Child

HOUR_MS = 3_600_000


class Machine:
    """The clocks of a machine, to be stepped, slept through and booted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.uptime, self.boot = clock.wall_ms(), 50_000, "first-boot"
        monkeypatch.setattr(clock, "wall_ms", lambda: self.wall)
        monkeypatch.setattr(clock.SystemClock, "now_ms", staticmethod(lambda: self.wall))
        monkeypatch.setattr(clock, "uptime_ms", lambda: self.uptime)
        monkeypatch.setattr(clock, "boot_id", lambda: self.boot)

    def step(self, milliseconds: int) -> None:
        """Set the wall clock, as NTP or a person does."""
        self.wall += milliseconds

    def pass_time(self, milliseconds: int) -> None:
        """Let time pass, awake or asleep."""
        self.wall += milliseconds
        self.uptime += milliseconds

    def restart(self, wall_step: int) -> None:
        """Boot again, with a wall clock that may have been set."""
        self.boot, self.uptime = "second-boot", 3_000
        self.wall += wall_step


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


def now(store: holdfast.Store) -> int:
    def read(tx: holdfast.Transaction) -> holdfast.Op[int]:
        row = yield from one("SELECT :now AS now_ms")
        assert row is not None
        return int(row["now_ms"])

    return store.run(read)


@pytest.mark.parametrize("step", [HOUR_MS, -HOUR_MS], ids=["forward", "back"])
def test_a_step_ends_no_live_lease(url: str, machine: Machine, step: int) -> None:
    with holdfast.open(url) as worker:
        worker.work.submit("step")
        (item,) = worker.work.claim("worker", lease_seconds=30)
        driven = worker.session("s").drive(lease_seconds=30)
        machine.step(step)
        machine.pass_time(20_000)
        with holdfast.open(url) as other:
            assert other.work.sweep().requeued == 0
            assert other.work.claim("other") == []
            with pytest.raises(holdfast.SessionBusy):
                other.session("s").drive()
        driven.close()
        item.complete()


@pytest.mark.parametrize("step", [HOUR_MS, -HOUR_MS], ids=["forward", "back"])
def test_a_step_prolongs_no_dead_lease(url: str, machine: Machine, step: int) -> None:
    with holdfast.open(url) as dead:
        dead.work.submit("step")
        dead.work.claim("dead", lease_seconds=2)
    machine.step(step)
    machine.pass_time(2_001)
    with holdfast.open(url) as other:
        assert other.work.sweep().requeued == 1


def ask(capsys: pytest.CaptureFixture[str], place: dict[str, str], *command: str) -> Any:
    """Run a command here, where the wall clock is stepped, and return what it prints."""
    options = [option for name, text in place.items() for option in (f"--{name}", text)]
    assert run([*command, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def levels(findings: Any) -> dict[str, str]:
    return {each["check"]: each["level"] for each in findings}


def test_a_step_puts_nothing_in_doubt_for_who_looks(
    place: dict[str, Any], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    with holdfast.open(**place) as store:
        store.work.submit("step")
        store.work.claim("worker", lease_seconds=30)
        driven = store.session("s").drive(lease_seconds=30)
        begun = driven.begin("mail", {"to": "ann"})
        assert not isinstance(begun, holdfast.Replay)
        before = store.now_ms()
        machine.step(HOUR_MS)
        assert before <= store.now_ms() < before + HOUR_MS // 2
        listed = ask(capsys, place, "effects", "list")
        assert (listed["in_doubt"], len(listed["effects"])) == ([], 1)
        assert ask(capsys, place, "effects", "show", begun.effect_id)["is_in_doubt"] is False
        found = levels(ask(capsys, place, "doctor"))
        assert (found["leases"], found["effects"]) == ("ok", "ok")
        begun.complete("sent")


def test_a_step_hides_nothing_that_has_expired(
    url: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"url": url}
    with holdfast.open(url) as store:
        store.work.submit("step")
        store.work.claim("dead", lease_seconds=2)
    machine.step(-HOUR_MS)
    machine.pass_time(2_001)
    assert levels(ask(capsys, place, "doctor"))["leases"] == "warning"
    # Nobody has opened it since the machine was booted again.
    machine.restart(0)
    assert levels(ask(capsys, place, "doctor"))["leases"] == "ok"
    machine.pass_time(2_001)
    assert levels(ask(capsys, place, "doctor"))["leases"] == "ok"
    with holdfast.open(url):
        pass
    machine.pass_time(2_001)
    assert levels(ask(capsys, place, "doctor"))["leases"] == "warning"


def test_another_process_shares_the_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = clock.wall_ms

    def later(say: Callable[[str], None]) -> None:
        monkeypatch.setattr(clock, "wall_ms", lambda: real() + HOUR_MS)
        with holdfast.open(url) as store:
            say(str(now(store)))

    with holdfast.open(url) as store:
        before = now(store)
    status, (said,) = Child(later).wait()
    assert status == 0
    with holdfast.open(url) as store:
        assert before <= int(said) <= now(store) < before + HOUR_MS // 2


@pytest.mark.parametrize("step", [HOUR_MS, 0, -HOUR_MS])
def test_the_next_boot_begins_with_the_wall_time_but_never_before_the_last_write(
    url: str, machine: Machine, step: int
) -> None:
    with holdfast.open(url) as store:
        store.work.submit("step")
        store.work.claim("dead", lease_seconds=2)
        last = now(store)
        assert last == machine.wall
    machine.restart(step)
    with holdfast.open(url) as store:
        begun = now(store)
        assert begun == max(machine.wall, last)
        machine.pass_time(2_001)
        assert now(store) == begun + 2_001
        assert store.work.sweep().requeued == 1


def test_an_async_store_keeps_the_same_time(url: str, machine: Machine) -> None:
    async def both() -> None:
        async with await holdfast.aopen(url) as store:
            await store.work.submit("step")
            await store.work.claim("worker", lease_seconds=30)
            machine.step(HOUR_MS)
            async with await holdfast.aopen(url) as other:
                assert (await other.work.sweep()).requeued == 0

    asyncio.run(both())


def test_without_an_uptime_to_compare_the_wall_time_serves(url: str, machine: Machine) -> None:
    machine.boot = None  # type: ignore[assignment]
    with holdfast.open(url) as store:
        machine.step(HOUR_MS)
        assert now(store) == machine.wall


def test_a_store_clock_that_goes_back_stands_still_until_it_has_caught_up(url: str) -> None:
    virtual = VirtualClock()
    with holdfast.open(url, clock=virtual) as store:
        before = now(store)
        virtual.advance(-3600)
        assert now(store) == before
        session: Any = store.session("s")
        assert session.info().created_at == before
        virtual.advance(3601)
        assert now(store) == before + 1_000
