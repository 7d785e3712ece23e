"""Work items and workers on the command line, on both databases."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli import app as app_module

COMMAND = [sys.executable, "-m", "holdfast"]
SECONDS_MAX = 180
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]

HANDLERS = """
import asyncio
import pathlib
import time

HERE = pathlib.Path(__file__).parent


def plain(item):
    (HERE / f"began-{item.id}").touch()
    while not (HERE / "go").exists():
        time.sleep(0.01)
    return "drained" if item.is_draining else "done"


async def asynchronous(item):
    (HERE / f"began-{item.id}").touch()
    while not (HERE / "go").exists():
        await asyncio.sleep(0.01)
    return "drained" if item.is_draining else "done"


sync_handlers = {"t": plain}
async_handlers = {"t": asynchronous}
not_handlers = 3


def made():
    return {"t": lambda item: item.input}
"""


@pytest.fixture
def quick(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command in this process, on the place, with nobody at the keyboard."""

    def quick(*arguments: str, stdin: str = "") -> Result:
        options = [f"--{name}={text}" for name, text in place.items()]
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capfd.readouterr()
        code = app_module.run([*arguments, *options])
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return quick


@pytest.fixture
def store(place: dict[str, str]) -> Iterator[holdfast.Store]:
    with holdfast.open(**place) as opened:  # type: ignore[arg-type]
        yield opened


def data(result: Result) -> Any:
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout)


def text(result: Result) -> str:
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


# Looking


def test_items_are_submitted_listed_and_shown(store: holdfast.Store, quick: Run) -> None:
    store.session("s")
    made = data(
        quick(
            "work", "submit", "mail", '{"to": "ann"}', "--session=s", "--priority=3",
            "--max-retries=1", "--key=k", "--on-crash=review", "--json",
        )
    )  # fmt: skip
    assert (made["input"], made["session_id"], made["priority"]) == ({"to": "ann"}, "s", 3)
    again = text(quick("work", "submit", "mail", "--key=k"))
    assert again.strip() == made["id"]
    quick("work", "submit", "later", "-", "--delay=3600", "--queue=q", stdin="[1, 2]")
    listed = data(quick("work", "list", "--json"))
    assert [item["type"] for item in listed["items"]] == ["later", "mail"]
    assert listed["items"][0]["input"] == [1, 2]
    assert all(ISO.fullmatch(item["created_at"]) for item in listed["items"])
    page = data(quick("work", "list", "--limit=1", "--json"))
    rest = data(quick("work", "list", f"--before={page['next_before']}", "--json"))
    assert [item["id"] for item in rest["items"]] == [made["id"]]
    for narrowed in ("--queue=q", "--type=later"):
        assert len(data(quick("work", "list", narrowed, "--json"))["items"]) == 1
    table = text(quick("work", "list"))
    assert "pending (time)" in table
    assert made["id"] in table
    assert "ann" in text(quick("work", "show", made["id"]))
    assert data(quick("work", "show", made["id"], "--json"))["on_crash"] == "review"
    assert text(quick("work", "why", made["id"])).startswith("It is ready")
    assert data(quick("work", "why", made["id"], "--json"))["id"] == made["id"]


def test_stored_text_cannot_command_the_terminal(store: holdfast.Store, quick: Run) -> None:
    item = store.work.submit("mail", "\x1b[31mred[bold]")
    [held] = store.work.claim("w")
    held.fail("\x1b]0;title\x07\r\n\tand more", retry=False)
    for command in (("show", item.id), ("why", item.id), ("list",), ("top", "--once")):
        assert "\x1b" not in text(quick("work", *command))
    # A line of an error is not a character that cannot be shown.
    for command in (("show", item.id), ("list",)):
        assert "\ufffd]0;title\ufffd  and more" in text(quick("work", *command))


def test_a_damaged_item_does_not_hide_the_others(store: holdfast.Store, quick: Run) -> None:
    from tests.checkpoints.colours import sql

    good, bad = store.work.submit("t", "good"), store.work.submit("t", "bad")
    sql(store, "UPDATE hf_work SET input = :junk WHERE id = :id", junk=b"junk", id=bad.id)
    found = data(quick("work", "list", "--json"))["items"]
    assert [item["id"] for item in found] == [bad.id, good.id]
    assert "damaged" in found[0]
    assert found[1]["input"] == "good"


def test_a_stored_time_out_of_range_does_not_hide_anything(
    store: holdfast.Store, quick: Run
) -> None:
    from tests.checkpoints.colours import sql

    item = store.work.submit("t", delay_seconds=1)
    store.session("s", agent="a").sleep(1)
    sql(
        store,
        f"UPDATE hf_work SET available_at = {2**53}",
        f"UPDATE hf_pauses SET wakes_at = {2**53}",
    )
    last = "9999-12-31T23:59:59.999Z"
    assert data(quick("work", "list", "--json"))["items"][-1]["available_at"] == last
    assert last in text(quick("work", "show", item.id))
    assert last in text(quick("peers", "pauses", "--json"))
    for command in (("work", "list"), ("work", "top", "--once"), ("doctor",)):
        assert "bug" not in quick(*command).stderr


def test_items_are_cancelled_retried_and_redriven(store: holdfast.Store, quick: Run) -> None:
    ids = [store.work.submit("t", n, delay_seconds=3600).id for n in range(3)]
    assert data(quick("work", "retry", ids[0], "--json"))["waits_for"] is None
    refused = quick("work", "cancel", ids[1])
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert text(quick("work", "cancel", ids[1], "--yes")) == f"Work item {ids[1]} is cancelled.\n"
    [held] = store.work.claim("w")
    freed = data(quick("work", "release", held.id, "--reason", "it hangs", "--yes", "--json"))
    assert freed == {"id": held.id, "status": "pending", "fence": held.fence + 1}
    [held] = store.work.claim("w")
    assert "asked to stop" in text(quick("work", "cancel", held.id, "--yes"))
    store.work.submit("u", "dead")
    [dead] = store.work.claim("w", queues="u")
    dead.fail("broken", retry=False)
    assert [each["id"] for each in data(quick("work", "list", "--dead", "--json"))["items"]] == [
        dead.id
    ]
    assert quick("work", "redrive").returncode == 2
    made = data(quick("work", "redrive", "--all", "--yes", "--json"))["items"]
    assert [(each["redriven_from"], each["input"]) for each in made] == [(dead.id, "dead")]
    assert text(quick("work", "redrive", "--all", "--yes")) == "There are no dead work items.\n"
    again = data(quick("work", "redrive", ids[1], "--json"))["items"]
    assert again[0]["redriven_from"] == ids[1]


def test_items_are_named_by_number_and_by_the_beginning_of_their_id(
    store: holdfast.Store, quick: Run
) -> None:
    for name in ("order-2026-11-a", "order-2026-11-b", "12345678"):
        store.work.submit("t", name, id=name, delay_seconds=3600)
    numbers = [item["number"] for item in data(quick("work", "list", "--json"))["items"]]
    a, b = str(numbers[2]), str(numbers[1])
    for named in (a, "order-2026-11-a"):
        assert data(quick("work", "show", named, "--json"))["id"] == "order-2026-11-a"
        assert data(quick("work", "why", named, "--json"))["id"] == "order-2026-11-a"
    assert data(quick("work", "show", "12345678", "--json"))["id"] == "12345678"
    assert data(quick("work", "show", "order-2026-11-a"[:-1] + "b", "--json"))["number"] == int(b)
    ambiguous = quick("work", "show", "order-20")
    assert ambiguous.returncode == 2
    assert "more than one work item" in ambiguous.stderr
    for unknown in ("99", "order-x", "order-9999", "ORDER-2026-11-A"):
        assert quick("work", "show", unknown).returncode == 3
    assert text(quick("work", "retry", a)) == "Work item order-2026-11-a is ready.\n"
    cancelled = data(quick("work", "cancel", b, "--yes", "--json"))
    assert cancelled == {"id": "order-2026-11-b", "status": "cancelled"}
    [again] = data(quick("work", "redrive", b, "--json"))["items"]
    assert again["redriven_from"] == "order-2026-11-b"
    assert data(quick("work", "show", again["id"][:-1], "--json"))["id"] == again["id"]


def test_one_item_that_cannot_be_redriven_does_not_stop_the_others(
    store: holdfast.Store, quick: Run
) -> None:
    for key in ("taken", "free"):
        store.work.submit("t", key, key=key)
        [dead] = store.work.claim("w")
        dead.fail("no", retry=False)
    living = store.work.submit("t", "other", key="taken")
    redriven = data(quick("work", "redrive", "--all", "--yes", "--json"))
    assert [item["input"] for item in redriven["items"]] == ["free"]
    assert [error["living"] for error in redriven["refused"]] == [living.id]
    assert "Not submitted: " in text(quick("work", "redrive", "--all", "--yes"))


def test_failed_work_of_sessions_that_have_ended_does_not_stop_the_others(
    store: holdfast.Store, quick: Run
) -> None:
    for queue in ("t", "agent:nobody"):
        if queue == "t":
            store.work.submit("t", "other")
        else:
            store.request("nobody", request_id="r1")
        [dead] = store.work.claim("w", queues=queue)
        dead.fail("no", retry=False)
    redriven = data(quick("work", "redrive", "--all", "--yes", "--json"))
    assert [item["input"] for item in redriven["items"]] == ["other"]
    assert [error["session_id"] for error in redriven["refused"]] == ["r1"]
    told = text(quick("work", "redrive", "--all", "--yes"))
    assert told.startswith("Not submitted: session r1 is failed; `holdfast sessions reopen r1")


def test_show_tells_the_last_errors(store: holdfast.Store, quick: Run) -> None:
    item = store.work.submit("t")
    for number in range(2):
        [held] = store.work.claim(f"worker-{number}")
        held.fail(f"no {number}", delay_seconds=0)
    shown = data(quick("work", "show", item.id, "--json"))
    assert shown["last_holder"] == "worker-1"
    assert [(e["attempt"], e["holder"], e["error"]) for e in shown["errors"]] == [
        (2, "worker-1", "no 1"),
        (1, "worker-0", "no 0"),
    ]
    assert all(ISO.fullmatch(each["ended_at"]) for each in shown["errors"])
    table = text(quick("work", "show", item.id))
    assert "no 0" in table
    assert "worker-0" in table
    names = [line.split()[0] for line in table.splitlines()[:5]]
    assert names == ["number", "id", "type", "status", "error"], "what matters comes first"
    assert "redriven" not in table, "what is absent is left out"
    assert shown["redriven_from"] is None


def test_several_statuses_are_listed_at_once(store: holdfast.Store, quick: Run) -> None:
    for number in range(3):
        store.work.submit("t", number)
    done, _ = store.work.claim("w", limit=2)
    done.complete()
    both = ("--status=pending", "--status=in_progress")
    found = data(quick("work", "list", *both, "--json"))["items"]
    assert [item["input"] for item in found] == [2, 1]
    assert len(data(quick("work", "list", "--json"))["items"]) == 3
    assert quick("work", "list", "--status=running").returncode == 2


def test_a_sweep_takes_dead_leases(store: holdfast.Store, quick: Run) -> None:
    for max_retries in (0, 1):
        store.work.submit("t", max_retries=max_retries)
    store.work.claim("dead", limit=2, lease_seconds=0.001)
    time.sleep(0.01)
    swept = data(quick("work", "sweep", "--json"))
    assert (swept["requeued"], swept["failed"], swept["parked"]) == (1, 1, 0)
    assert "0 requeued, 0 failed" in text(quick("work", "sweep"))


def test_top_shows_the_queue_once_or_as_json(store: holdfast.Store, quick: Run) -> None:
    store.work.submit("mail")
    store.work.submit("mail")
    store.work.claim("worker-1")
    seen = data(quick("work", "top", "--json"))
    assert seen["leases"]["active"] == 1
    assert {(count["status"], count["items"]) for count in seen["counts"]} == {
        ("pending", 1),
        ("in_progress", 1),
    }
    assert [item["holder"] for item in seen["running"]] == ["worker-1"]
    picture = text(quick("work", "top", "--once"))
    assert "completed" not in picture
    counted = text(quick("work", "top", "--once", "--finished"))
    assert "completed" in counted
    assert "1 running" in picture
    assert "worker-1" in picture
    assert "oldest heartbeat" in picture
    assert quick("work", "top", "--every=0").returncode == 2


def test_top_tells_no_age_of_heartbeats_where_there_are_none(quick: Run) -> None:
    first, *rest = text(quick("work", "top", "--once")).splitlines()
    assert first.strip().endswith("0 running, 0 stale, 0 expired, 0 asked to stop")
    assert [line for line in rest if line] == ["Nothing is waiting or running."]


def test_a_session_is_named_by_the_beginning_of_its_id(store: holdfast.Store, quick: Run) -> None:
    store.session("a-long-name")
    made = data(quick("work", "submit", "mail", "--session=a-long-n", "--json"))
    assert made["session_id"] == "a-long-name"
    found = data(quick("work", "list", "--session=a-long-n", "--json"))["items"]
    assert [each["id"] for each in found] == [made["id"]]
    missing = quick("work", "list", "--session=nobody")
    assert (missing.returncode, missing.stderr) == (3, "Error: there is no session 'nobody'\n")


def test_top_is_live_in_a_terminal(place: dict[str, str], store: holdfast.Store) -> None:
    options = [f"--{name}={value}" for name, value in place.items()]
    process, descriptor = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm", COLUMNS="200", LINES="40")
        os.execv(sys.executable, [*COMMAND, "work", "top", "--every=0.1", *options])
    try:
        _read_until(descriptor, "Nothing is waiting")
        store.work.submit("urgent mail")
        _read_until(descriptor, "urgent mail")
    finally:
        status = _interrupt(process, descriptor)
    assert os.waitstatus_to_exitcode(status) == 130


def _read_until(descriptor: int, wanted: str) -> None:
    seen, deadline = "", time.monotonic() + SECONDS_MAX
    while wanted not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([descriptor], [], [], 0.2)[0]:
            seen += os.read(descriptor, 65536).decode(errors="replace")


def _interrupt(process: int, descriptor: int) -> int:
    """Press Ctrl-C until it ends, as a person would; return its status."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        os.kill(process, signal.SIGINT if time.monotonic() < deadline else signal.SIGKILL)
        pressed_at = time.monotonic()
        while time.monotonic() < pressed_at + 3:
            with contextlib.suppress(OSError):
                if select.select([descriptor], [], [], 0.1)[0]:
                    os.read(descriptor, 65536)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return status


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show", "nothing"), 3, "no work item"),
        (("why", "nothing"), 3, "no work item"),
        (("retry", "nothing"), 3, "no work item"),
        (("submit", "t", "{not json"), 2, "INPUT is not JSON text"),
        (("submit", "t", "--session=none"), 3, "no session"),
        (("submit", "t", "--max-retries=-1"), 2, "--max-retries"),
        (("submit", "t", "--on-crash=panic"), 2, "--on-crash"),
        (("list", "--status=lost"), 2, "--status must be one of"),
        (("list", "--limit=0"), 2, "limit"),
        (("list", "--dead", "--type=t"), 2, "--dead"),
        (("run", "handlers"), 2, "MODULE:HANDLERS"),
        (("run", "no_such_module:handlers"), 2, "cannot be loaded"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    store: holdfast.Store, quick: Run, arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = quick("work", *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    as_json = quick("work", *arguments, "--json")
    assert said in json.loads(as_json.stderr)["message"]


# Running


class Workers:
    """Worker processes started from a folder with a module of handlers."""

    def __init__(self, place: dict[str, str], store: holdfast.Store, folder: Path) -> None:
        self.folder = folder
        self._place = place
        self._store = store
        self._processes: list[subprocess.Popen[str]] = []
        (folder / "mails.py").write_text(HANDLERS)

    def start(self, handlers: str, *options: str) -> subprocess.Popen[str]:
        arguments = [f"--{name}={value}" for name, value in self._place.items()]
        # A machine that stands still for a while must not cost a worker its items.
        arguments.append(f"--lease={10 * SECONDS_MAX}")
        process = subprocess.Popen(
            [*COMMAND, "work", "run", f"mails:{handlers}", *arguments, *options],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def wait_for(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_so():
            is_running = all(process.poll() is None for process in self._processes)
            may_wait = is_running and time.monotonic() < deadline
            assert may_wait, self.told()
            time.sleep(0.02)

    def told(self) -> list[object]:
        """End the processes, and say what they wrote and where the items are."""
        items = [(item.id, item.status, item.holder) for item in self._store.work.list()]
        ended: list[object] = [self.began(), items]
        for process in self._processes:
            ended.append(process.poll())
            process.kill()
            ended.append(process.communicate())
        return ended

    def began(self) -> int:
        return len(list(self.folder.glob("began-*")))

    def held(self) -> int:
        return len(self._store.work.list(status="in_progress"))

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def workers(place: dict[str, str], store: holdfast.Store, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(place, store, tmp_path)
    yield made
    made.close()


def test_a_worker_runs_until_nothing_is_left(store: holdfast.Store, workers: Workers) -> None:
    for number in range(5):
        store.work.submit("t", number, queue="fast")
    process = workers.start("made", "--until-empty", "--queues=fast,slow", "--json")
    output, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, errors
    assert json.loads(output)["ended"] == {"completed": 5}
    found = store.work.list(status="completed")
    assert sorted(item.output for item in found) == list(range(5))
    refused = workers.start("not_handlers")
    assert "must be a dict" in refused.communicate(timeout=SECONDS_MAX)[1]
    assert refused.returncode == 2


def test_a_worker_of_plain_handlers_awaits_the_hooks_of_tools(
    place: dict[str, Any], store: holdfast.Store, workers: Workers
) -> None:
    (workers.folder / "bank.py").write_text(
        "import holdfast\n"
        "async def verify(arguments, idempotency_key):\n"
        "    return holdfast.Landed('seen at the bank')\n"
        "@holdfast.tool(effect='mutate', verify=verify)\n"
        "async def pay(cents: int) -> None: ...\n"
    )
    with holdfast.open(**place, clock=holdfast.VirtualClock(1_700_000_000_000)) as before:
        begun = before.session("s").begin("pay", {"cents": 5})
        assert isinstance(begun, holdfast.Issued)
    store.work.submit("t", 1)
    process = workers.start("made", "--until-empty", "--tools=bank:pay", "--json")
    output, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, errors
    assert json.loads(output)["ended"] == {"completed": 1}
    assert store.effect(begun.effect_id).result == "seen at the bank"


@pytest.mark.parametrize("handlers", ["sync_handlers", "async_handlers"])
def test_sigterm_drains_and_spends_no_retry(
    store: holdfast.Store, workers: Workers, handlers: str
) -> None:
    """In both colours: what runs is finished, what waits is given back."""
    ids = [item.id for item in store.work.submit_many([holdfast.Submission("t")] * 5)]
    process = workers.start(handlers, "--concurrency=2", "--prefetch=3", "--instance=one")
    workers.wait_for(lambda: workers.began() == 2 and workers.held() == 5)
    process.send_signal(signal.SIGTERM)
    workers.wait_for(lambda: workers.held() == 2)
    (workers.folder / "go").touch()
    output, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, errors
    assert output == "Stopped: 2 completed, 3 released.\n"
    items = [store.work.get(id) for id in ids]
    assert (
        sorted((each.status, each.output) for each in items if each.output)
        == [("completed", "drained")] * 2
    )
    assert [(each.retry_count, each.rescues, each.failures) for each in items] == [(0, 0, 0)] * 5
    assert [each.releases for each in items if each.status == "pending"] == [1, 1, 1]


@pytest.mark.parametrize("handlers", ["sync_handlers", "async_handlers"])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(
    store: holdfast.Store, workers: Workers, handlers: str, second: signal.Signals
) -> None:
    ids = [item.id for item in store.work.submit_many([holdfast.Submission("t")] * 3)]
    process = workers.start(handlers, "--concurrency=2", "--prefetch=1", "--drain=600")
    workers.wait_for(lambda: workers.began() == 2 and workers.held() == 3)
    process.send_signal(signal.SIGTERM)
    # It has heard the first when it gives back what it had not begun.
    workers.wait_for(lambda: workers.held() == 2)
    assert process.poll() is None
    process.send_signal(second)
    output, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 130, errors
    assert output == "Stopped: 3 released.\n"
    items = [store.work.get(id) for id in ids]
    assert [(each.status, each.retry_count, each.releases) for each in items] == [
        ("pending", 0, 1)
    ] * 3


def test_what_outlasts_the_drain_is_given_back(store: holdfast.Store, workers: Workers) -> None:
    id = store.work.submit("t").id
    process = workers.start("async_handlers", "--drain=0.2")
    workers.wait_for(lambda: workers.began() == 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, output) == (0, "Stopped: 1 released.\n")
    item = store.work.get(id)
    assert (item.status, item.retry_count, item.releases) == ("pending", 0, 1)
