"""Serving agents and asking them on the command line, on both databases."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli import app as app_module
from holdfast.clock import VirtualClock
from holdfast.mesh.nats import Nats
from tests.client.served import Serving
from tests.faces.test_cli_work import Run, data, quick
from tests.nats_server import NatsServer

__all__ = ["quick"]

COMMAND = [sys.executable, "-m", "holdfast"]
SECONDS_MAX = 180
AGENTS = """
import holdfast
from holdfast.mesh import Service


def ask(request):
    request.store.progress(request.ask_id, f"asking for {request.input}")
    request.session.ask("weather", request.input)
    return request.session.pause({"city": request.input})


def answered(resumption):
    [answer] = resumption.answers
    return f"{resumption.context['city']}: {answer.result}"


async def ask_async(request):
    return request.input


async def fail(request):
    raise holdfast.WorkFailed("there is no such city")


@holdfast.tool(effect="mutate", verify=lambda args, key: holdfast.Landed("seen at the bank"))
def pay(cents: int):
    raise AssertionError("it must not run")


planner = Service("planner", ask, answered)
payer = Service("payer", lambda request: "paid", tools=[pay])
weather = Service("weather", lambda request: "sun")
careful = Service("careful", lambda request: request.session.wait_for_approval("pay?"))
echo = Service("echo", ask_async)


@holdfast.tool(effect="mutate")
def charge(cents: int):
    raise OSError("the line went dead")


cashier = Service("cashier", lambda request: request.session.call(charge, cents=5).value)
broken = Service("broken", fail)
not_an_agent = 3


def made():
    return weather
"""


@pytest.fixture(autouse=True)
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_here.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("agents_here", None)


def serve(quick: Run, name: str) -> Any:
    result = quick("agent", "run", f"agents_here:{name}", "--until-empty", "--json")
    assert result.returncode == 0
    return json.loads(result.stdout)


def test_an_agent_is_served_and_asked_and_its_answer_come_back_for(
    place: dict[str, Any], quick: Run
) -> None:
    holdfast.open(**place).close()
    asked = quick("agent", "request", "planner", '"Oslo"', "--id=r1", "--user=ann", "--timeout=0")
    assert (asked.returncode, "holdfast agent wait r1" in asked.stdout) == (4, True)
    again = quick("agent", "wait", "r1", "--transport=database", "--timeout=0")
    assert "holdfast agent wait r1 --transport database" in again.stdout
    waiting = quick("agent", "wait", "r1", "--timeout=0", "--json")
    assert (waiting.returncode, json.loads(waiting.stdout)["state"]) == (4, "open")
    assert serve(quick, "planner")["ended"] == {"completed": 1}
    for name in ("made", "planner"):
        serve(quick, name)
    done = quick("agent", "wait", "r1")
    assert (done.returncode, done.stdout.strip()) == (0, "Oslo: sun")
    assert done.stderr.strip() == "asking for Oslo"
    again = quick("agent", "request", "planner", '"Oslo"', "--id=r1", "--json")
    assert json.loads(again.stdout)["answer"]["result"] == "Oslo: sun"
    assert json.loads(again.stderr) == {"progress": "asking for Oslo"}
    other = quick("agent", "request", "planner", '"Rome"', "--id=r1")
    assert other.returncode == 4
    assert quick("agent", "wait", "none").returncode == 3


@pytest.mark.parametrize(
    "command", [["agents_here:payer"], ["agents_here:weather", "--tools=agents_here:pay"]]
)
def test_what_another_process_left_is_verified_with_the_tools_of_an_agent(
    place: dict[str, Any], quick: Run, command: list[str]
) -> None:
    from agents_here import pay  # type: ignore[import-not-found]

    with holdfast.open(**place, clock=VirtualClock(1_700_000_000_000)) as store:
        begun = store.session("s").begin(pay, {"cents": 5})
    assert isinstance(begun, holdfast.Issued)
    told = " ".join(quick("doctor").stdout.split())
    assert "1 effect left by an owner whose lease ended" in told
    assert "`holdfast effects verify 1 --tools MODULE:TOOL" in told
    assert quick("agent", "run", *command, "--until-empty").returncode == 0
    with holdfast.open(**place) as store:
        assert store.effect(begun.effect_id).result == "seen at the bank"
    assert "None in doubt" in quick("doctor").stdout


def test_who_asks_an_agent_that_nobody_serves_is_told_what_to_do(
    place: dict[str, Any], quick: Run
) -> None:
    holdfast.open(**place).close()
    asked = quick("agent", "request", "nobody", "--id=r1", "--timeout=0")
    assert asked.returncode == 4
    untaken, serve_it, again, wait_for_it = asked.stdout.splitlines()
    assert untaken == "No instance of agent nobody has taken the request. Serve the agent:"
    assert serve_it.startswith("  `holdfast agent run MODULE:AGENT")
    assert again == "Wait for the answer again:"
    assert wait_for_it.startswith("  `holdfast agent wait r1")
    # Taken, but not answered: it is served.
    with holdfast.open(**place) as store:
        store.work.claim("an instance", queues="agent:nobody")
    waited = quick("agent", "wait", "r1", "--timeout=0")
    assert waited.stdout.splitlines()[:2] == ["There is no answer yet.", again]


def test_who_waits_for_a_decision_is_told_which(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place) as store:
        # It waits too, but not in this tree.
        store.session("other", agent="other").wait_for_approval("and this?")
    quick("agent", "request", "careful", "--id=r1", "--timeout=0")
    serve(quick, "careful")
    waited = quick("agent", "wait", "r1", "--timeout=0")
    first, decide, again, _ = waited.stdout.splitlines()
    assert (waited.returncode, first) == (4, "There is no answer yet: a person must decide first.")
    assert decide.startswith("  `holdfast approvals show 2")
    assert again == "Wait for the answer again:"


def test_who_waits_for_an_effect_in_doubt_is_told_which(place: dict[str, Any], quick: Run) -> None:
    holdfast.open(**place).close()
    quick("agent", "request", "cashier", "--id=r1", "--timeout=0")
    serve(quick, "cashier")
    with holdfast.open(**place) as store:
        [effect] = store.effects(session="r1", status="unknown")
    waited = quick("agent", "wait", "r1", "--timeout=0")
    first, look, again, _ = waited.stdout.splitlines()
    assert first == (
        "There is no answer yet: the outcome of an effect is unknown, and must be resolved first."
    )
    assert look.startswith(f"  `holdfast effects show {effect.id}")
    assert again == "Wait for the answer again:"
    resolved = quick("effects", "resolve", effect.id, "--landed", "--by=ann")
    assert resolved.returncode == 0
    assert quick("agent", "wait", "r1", "--timeout=0").stdout.startswith(
        "There is no answer yet.\n"
    )
    serve(quick, "cashier")
    assert quick("agent", "wait", "r1").returncode == 0


def test_who_waits_for_a_review_is_told_of_which_work(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place, clock=VirtualClock(1_700_000_000_000)) as store:
        store.session("other")
        store.request("nobody", request_id="r1")
        for session in ("other", "r1"):
            store.work.submit("part", session=session, on_crash="review", queue="parts")
        assert len(store.work.claim("who died", queues=["agent:nobody", "parts"], limit=3)) == 3
    with holdfast.open(**place) as store:
        store.work.sweep()
        [part] = store.work.list(session="r1", type="part")
    waited = quick("agent", "wait", "r1", "--timeout=0")
    first, look, again, _ = waited.stdout.splitlines()
    assert first == "There is no answer yet: its work waits for a person's review."
    assert look.startswith(f"  `holdfast work why {part.number}")
    assert again == "Wait for the answer again:"


def test_who_waits_with_a_token_for_a_tree_is_told_why_it_has_no_answer(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    serving = Serving(place)
    client = serving()
    try:
        with holdfast.open(**place) as store:
            store.request("careful", request_id="r1")
            token = store.tokens.create("limited", permission="write", session="r1")
        monkeypatch.setenv("HOLDFAST_TOKEN", token.secret)

        def lines() -> list[str]:
            capfd.readouterr()
            asked = ["agent", "wait", "r1", "--timeout=0", f"--url={client['url']}"]
            assert app_module.run(asked) == 4
            return capfd.readouterr().out.splitlines()

        assert lines()[0].startswith("No instance of agent careful has taken the request.")
        from agents_here import careful

        with holdfast.open(**place) as store:
            careful.worker(store).run(until_empty=True)
        assert lines()[0] == "There is no answer yet: a person must decide first."
        with holdfast.open(**place) as store:
            [waiting] = store.pauses(state="waiting")
            store.approve(waiting.id, by="ann")
        assert lines()[0] == "There is no answer yet."
    finally:
        serving.close()


def test_the_log_of_an_agent_does_not_tell_single_requests(
    place: dict[str, Any], quick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = logging.getLogger("httpx")
    monkeypatch.setattr(client, "level", logging.NOTSET)
    client.manager._clear_cache()  # type: ignore[attr-defined]
    holdfast.open(**place).close()
    serve(quick, "weather")
    assert logging.getLogger("holdfast.worker").isEnabledFor(logging.WARNING)
    assert not client.isEnabledFor(logging.INFO)


def test_an_answer_that_is_an_error_is_told_with_the_exit_code(
    place: dict[str, Any], quick: Run
) -> None:
    holdfast.open(**place).close()
    quick("agent", "request", "broken", "--id=r1", "--timeout=0")
    quick("agent", "request", "echo", "-", "--id=r2", "--timeout=0", stdin='{"a": 1}')
    serve(quick, "broken")
    serve(quick, "echo")
    failed = quick("agent", "wait", "r1")
    assert failed.returncode == 1
    assert "there is no such city" in failed.stdout
    assert data(quick("agent", "wait", "r2", "--json"))["answer"]["result"] == {"a": 1}


def test_an_answer_of_several_lines_is_shown_as_it_was_written(
    place: dict[str, Any], quick: Run
) -> None:
    letter = "Dear Ann,\n\n  the train  leaves at 7: `holdfast agent wait x`\x1b[31m"
    holdfast.open(**place).close()
    quick("agent", "request", "echo", json.dumps(letter), "--id=r1", "--timeout=0")
    serve(quick, "echo")
    shown = quick("agent", "wait", "r1")
    assert shown.stdout == letter.replace("\x1b", "\ufffd") + "\n"


def test_what_cannot_be_served_or_asked_is_told(place: dict[str, Any], quick: Run) -> None:
    holdfast.open(**place).close()
    for wrong in ("agents_here", "agents_here:none", "agents_here:not_an_agent", "no_such:x"):
        result = quick("agent", "run", wrong)
        assert (result.returncode, wrong in result.stderr) == (2, True)
    function = quick("agent", "run", "agents_here:ask")
    assert (function.returncode, "must be a Service" in function.stderr) == (2, True)
    assert quick("agent", "request", "planner", "{").returncode == 2
    assert quick("agent", "request", "planner", "--timeout=-1").returncode == 2
    for command in (("run", "agents_here:planner"), ("request", "planner"), ("wait", "r1")):
        result = quick("agent", *command, "--transport=pigeon://roof")
        assert (result.returncode, "pigeon" in result.stderr) == (2, True)
    for address, wrong in (
        (
            "nats://127.0.0.1:1?prefx=foo",
            "prefix, ack_seconds, credentials, each once",
        ),
        ("nats://127.0.0.1:1?prefix=a&prefix=b", "each once, not 'prefix'"),
        ("nats://127.0.0.1:1?prefix=a.b", "prefix must be"),
        ("nats://127.0.0.1:1?ack_seconds=soon", "ack_seconds must be a number, not 'soon'"),
        ("nats://127.0.0.1:1?credentials=none.creds", "there is no file 'none.creds'"),
        ("nats://me:s3cret@127.0.0.1:1/travel", "nothing after its port"),
        ("nats:/me:s3cret@127.0.0.1:1", "an address of NATS is nats://HOST:PORT"),
        ("natss://me:s3cret@127.0.0.1:1", "database or nats://host:port, not '…'"),
        ("s3cret@127.0.0.1:1", "database or nats://host:port, not '…'"),
        ("http://127.0.0.1?token=s3cret", "database or nats://host:port, not '…'"),
    ):
        result = quick("agent", "request", "planner", f"--transport={address}")
        assert (result.returncode, wrong in result.stderr) == (2, True), result.stderr
        assert "s3cret" not in result.stderr
    assert repr(Nats.at("nats://127.0.0.1:1?prefix=team&ack_seconds=5")) == "<Nats team>"
    with holdfast.open(**place) as store:
        assert store.asks() == []


def test_a_request_has_a_deadline_only_if_it_is_given_one(
    place: dict[str, Any], quick: Run
) -> None:
    holdfast.open(**place).close()
    for id, options in (("r1", []), ("r2", ["--deadline=60"]), ("r3", ["--deadline=0"])):
        quick("agent", "request", "planner", f"--id={id}", "--timeout=0", *options)
    with holdfast.open(**place) as store:
        assert store.peer_call("r1").deadline_at is None
        assert store.peer_call("r2").timeout_seconds == 60
        store.recover()
        assert store.peer_call("r3").state == "timeout"


def test_requests_are_carried_by_nats(tmp_path: Path, quick: Run, place: dict[str, Any]) -> None:
    holdfast.open(**place).close()
    (tmp_path / "nats").mkdir()
    with NatsServer(tmp_path / "nats") as server:
        carried = f"--transport={server.url}?prefix=travel-team"
        asked = quick("agent", "request", "echo", '"hello"', "--id=r1", "--timeout=0", carried)
        assert asked.returncode == 4
        command = [*COMMAND, "agent", "run", "agents_here:echo", carried]
        command += [f"--{name}={text}" for name, text in place.items()]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as serving:
            try:
                done = quick("agent", "wait", "r1", "--timeout=180", carried)
            finally:
                serving.send_signal(signal.SIGTERM)
        assert (done.returncode, done.stdout.strip()) == (0, "hello")


def test_ctrl_c_leaves_the_request_running_and_says_how_to_come_back(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with holdfast.open(url) as store:
        command = [*COMMAND, "agent", "request", "planner", '"Oslo"', "--id=r1", f"--url={url}"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as waiting:
            store_sees(store, "r1")
            # Its first note is printed once it waits.
            store.progress("r1", "begun")
            assert waiting.stderr is not None
            assert waiting.stderr.readline() == "begun\n"
            waiting.send_signal(signal.SIGINT)
            told, _ = waiting.communicate(timeout=SECONDS_MAX)
        assert waiting.returncode == 130
        assert f"holdfast agent wait r1 --url {url}" in told
        assert store.peer_call("r1").state == "open"


def test_the_command_that_comes_back_is_quoted_and_repeats_no_credentials(
    place: dict[str, Any], quick: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.open(**place).close()
    monkeypatch.setattr("holdfast.cli.agent.opened", lambda _: contextlib.nullcontext())
    given = ("--id=r 1; ls", "--transport=nats://secret@far:4222", "--timeout=0")
    asked = quick("agent", "request", "weather", *given)
    assert "holdfast agent wait 'r 1; ls' --transport URL" in asked.stdout
    assert "secret" not in asked.stdout


def store_sees(store: holdfast.Store, id: str) -> None:
    """Wait until a request has been made."""
    for event in store.follow_all():
        if event.root_id == id:
            return
