"""Budgets that hold, retries that are counted, and money that is never forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.agent import (
    Agent,
    AttemptFailed,
    Budget,
    Message,
    ModelError,
    Price,
    Request,
    Response,
    ScriptedModel,
    TextBlock,
    Usage,
    call,
)
from holdfast.errors import (
    BudgetExceeded,
    InvalidArgument,
    InvalidValue,
    LeaseLost,
    LimitExceeded,
    ModelFailed,
)
from holdfast.testing.subject import Subject, done, raises
from tests.agent.helpers import PRICE, World, run, usage
from tests.checkpoints.colours import both_colours
from tests.crash.children import Child
from tests.crash.children import run as run_child


def answer_of_a_person() -> dict[str, Any]:
    return Message(role="assistant", blocks=(TextBlock(text="I answer."),), id="a-1").to_plain()


def really_spent(world: World) -> Decimal:
    return sum((Decimal(line.split()[1]) for line in world.lines if "asked" in line), Decimal(0))


@both_colours
async def test_a_budget_is_never_exceeded_and_a_larger_one_goes_on(subject: Subject) -> None:
    world = World(subject.directory)
    script = [*(call("look", city=str(number)) for number in range(20)), "ok"]
    store = await subject.open()
    session = await done(store.session())
    limit = Decimal("0.002")
    agent = Agent(session, world.model(script), tools=world.tools(), budget=Budget(usd=limit))
    error = await raises(BudgetExceeded, lambda: run(agent, "go"))
    spent = await done(session.spent())
    assert 0 < spent.usd == really_spent(world) <= limit
    assert spent.usd + Decimal(error.next_usd) > limit
    asked = world.count("asked")
    await raises(BudgetExceeded, lambda: run(agent))
    assert world.count("asked") == asked, "a spent budget asks nobody"
    richer = Agent(session, world.model(script), tools=world.tools(), budget=Budget(usd=1))
    assert (await run(richer)).text == "ok"
    assert (await done(session.spent())).usd == really_spent(world)
    assert world.count("look") == 20


@both_colours
async def test_what_was_said_before_the_budget_stopped_the_run_is_kept(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    model = ScriptedModel(["Hello."], price=PRICE)
    await raises(BudgetExceeded, lambda: run(Agent(session, model, budget=Budget(usd=0)), "Hi"))
    outcome = await run(Agent(session, model))
    assert (outcome.text, outcome.iteration) == ("Hello.", 1)
    latest = await done(session.latest())
    assert [message["role"] for message in latest["transcript"]] == ["user", "assistant"]


@both_colours
async def test_tokens_are_limited_too(subject: Subject) -> None:
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())
    model = world.model([call("look", city="x" * 400), "ok"])
    agent = Agent(session, model, tools=world.tools(), budget=Budget(tokens=400))
    await raises(BudgetExceeded, lambda: run(agent, "go"))
    assert 0 < (await done(session.spent())).tokens <= 400


@both_colours
async def test_a_budget_of_a_tree_counts_its_other_sessions(subject: Subject) -> None:
    store = await subject.open()
    root = await done(store.session("root"))
    child = await done(store.session("child", parent="root"))
    await done(root.spend("m", usd=1))
    own = Agent(child, ScriptedModel(["a", "b"]), budget=Budget(usd="0.5"))
    assert (await run(own, "hi")).text == "a"
    shared = Agent(child, ScriptedModel(["a", "b"]), budget=Budget(usd="0.5", tree=True))
    await raises(BudgetExceeded, lambda: run(shared, "hi"))


@both_colours
async def test_sessions_that_ask_at_once_stay_within_the_budget_of_their_tree(
    subject: Subject,
) -> None:
    store = await subject.open()
    await done(store.session("root"))
    barrier, is_refused = threading.Barrier(4), threading.Event()

    class Together(Flaky):
        def estimate(self, request: Request) -> Usage:
            barrier.wait(60)
            return super().estimate(request)

        def __call__(self, request: Request) -> Response:
            # What has answered costs less than its estimate, and would leave room for all.
            is_refused.wait(60)
            return super().__call__(request)

    async def ask(number: int) -> str:
        session = await done(store.session(f"s{number}", parent="root"))
        agent = Agent(session, Together(), budget=Budget(usd="0.025", tree=True))
        try:
            return (await run(agent, "hi")).text
        except BudgetExceeded:
            is_refused.set()
            return "refused"

    if subject.colour == "sync":
        threads = [asyncio.to_thread(asyncio.run, ask(number)) for number in range(4)]
        answers = await asyncio.gather(*threads)
    else:
        answers = await asyncio.gather(*map(ask, range(4)))
    root = await done(store.session("root"))
    assert answers.count("refused") >= 1
    attempts = [
        each for number in range(4) for each in await done(store.spends(session=f"s{number}"))
    ]
    assert len(attempts) == 4 - answers.count("refused")
    assert (await done(root.spent(tree=True))).usd <= Decimal("0.025")


def test_processes_that_ask_at_once_stay_within_the_budget_of_their_tree(
    place: dict[str, Any], tmp_path: Path
) -> None:
    """Every process holds its reservation until all have been answered or refused."""
    with holdfast.open(**place) as store:
        store.session("root")

    def wait_for_lines(path: Path, count: int) -> None:
        while len(path.read_text().splitlines()) < count:
            time.sleep(0.01)

    ready, ended = tmp_path / "ready", tmp_path / "ended"
    ready.touch()
    ended.touch()

    def note(path: Path) -> None:
        with path.open("a") as file:
            file.write("x\n")

    class Held(Flaky):
        def estimate(self, request: Request) -> Usage:
            note(ready)
            wait_for_lines(ready, 4)
            return super().estimate(request)

        def __call__(self, request: Request) -> Response:
            note(ended)
            wait_for_lines(ended, 4)
            return super().__call__(request)

    def work(number: int, say: Any) -> None:
        with holdfast.open(**place) as store:
            session = store.session(f"s{number}", parent="root")
            agent = Agent(session, Held(), budget=Budget(usd="0.025", tree=True))
            try:
                say(agent.run("hi").text)
            except BudgetExceeded:
                note(ended)
                say("refused")

    children = [Child(partial(work, number)) for number in range(4)]
    said = sorted(line for child in children for line in child.wait()[1])
    assert said == ["at last", "at last", "refused", "refused"]
    with holdfast.open(**place) as store:
        spent = store.session("root").spent(tree=True)
    assert (spent.usd, spent.attempts) == (Decimal("0.006"), 2)


def test_an_attempt_that_died_counts_what_its_repetition_cost(place: dict[str, Any]) -> None:
    class Deadly(Flaky):
        def __call__(self, request: Request) -> Response:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("it is dead")

    def die(say: Any) -> None:
        with holdfast.open(**place) as store:
            Agent(store.session("s"), Deadly(), instance="a").run("hi", message_id="m")

    assert run_child(die)[0] == -signal.SIGKILL
    assert run_child(die)[0] == -signal.SIGKILL
    with holdfast.open(**place) as store:
        session = store.session("s")
        assert session.spent().usd == Decimal("0.02")
        outcome = Agent(session, Flaky(), instance="a", budget=Budget(usd="0.031")).run(
            "hi", message_id="m"
        )
        assert outcome.spent.usd == Decimal("0.009")
        assert outcome.spent.uncertain_usd == Decimal("0.006")
        first, second, third = store.spends(session="s")
        assert [each.state for each in (first, second, third)] == ["uncertain"] * 2 + ["settled"]
        store.correct_spend(first.id, usd="0.002", by="jo", note="invoice 7")
        late = session.spend("m-2", id=second.id, usd="0.001", input_tokens=1, source="agent")
        assert late.state == "settled", "usage that becomes known later takes the estimate's place"
        assert session.spent().usd == Decimal("0.006")
        assert session.spent().uncertain_attempts == 0


@both_colours
async def test_an_attempt_is_counted_by_the_repetition_of_the_same_question_only(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session())
    failing = Flaky(TimeoutError("no answer"))
    await raises(ModelFailed, lambda: run(Agent(session, failing, retries=0), "one"))
    await done(session.append("transcript", [answer_of_a_person()]))
    await run(Agent(session, Flaky()), "two")
    lost, answered = await done(session.spends())
    assert (lost.state, lost.usd) == ("uncertain", Decimal("0.01"))
    assert answered.usd == Decimal("0.003")


@both_colours
async def test_a_model_that_says_nothing_of_its_cost_reconciles_nothing(subject: Subject) -> None:
    class Silent(Flaky):
        def __call__(self, request: Request) -> Response:
            return Response(blocks=super().__call__(request).blocks)

    store = await subject.open()
    session = await done(store.session())
    await run(Agent(session, Silent(TimeoutError("no")), backoff_seconds=0), "one")
    lost, _ = await done(session.spends())
    assert (lost.state, lost.usd) == ("uncertain", Decimal("0.01"))


@both_colours
async def test_a_model_without_a_price_cannot_keep_a_budget_in_dollars(subject: Subject) -> None:
    def model(request: Request) -> Response:
        return Response(blocks=[TextBlock(text="hi")], usage=usage(5, 1))

    store = await subject.open()
    session = await done(store.session())
    agent = Agent(session, model, budget=Budget(usd=1))
    assert (await run(agent, "one")).spent.unpriced == 1
    await raises(BudgetExceeded, lambda: run(agent, "two"))
    tokens = Agent(session, model, budget=Budget(tokens=100))
    assert (await run(tokens, "two")).spent.tokens == 12


class Flaky:
    """A model that fails as it is told before it answers."""

    name = "flaky"

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.asked = 0

    def estimate(self, request: Request) -> Usage:
        return usage(100, 100, Decimal("0.01"))

    def __call__(self, request: Request) -> Response:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return Response(
            blocks=[TextBlock(text="at last")], usage=usage(90, 10, Decimal("0.003")), model="m-2"
        )


@both_colours
async def test_retries_are_recorded_and_counted(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    model = Flaky(
        ModelError("overloaded", is_retryable=True, usage=usage(50, 0, Decimal("0.001"))),
        TimeoutError("no answer"),
    )
    told: list[Any] = []
    agent = Agent(session, model, backoff_seconds=0, on_progress=told.append)
    outcome = await run(agent, "hi")
    assert (outcome.text, model.asked) == ("at last", 3)
    first, second, third = await done(session.spends())
    assert [each.state for each in (first, second, third)] == ["failed", "uncertain", "settled"]
    assert [each.usd for each in (first, second, third)] == [
        Decimal("0.001"), Decimal("0.003"), Decimal("0.003"),
    ]  # fmt: skip
    assert [each.source for each in (first, second, third)] == ["agent", "retry", "retry"]
    assert (first.details["error"], third.model) == ("ModelError: overloaded", "m-2")
    assert second.details["counted_as"] == third.id
    assert outcome.spent.usd == Decimal("0.007")
    assert outcome.spent.uncertain_usd == Decimal("0.003")
    by = {(each.model, each.source): each.usd for each in outcome.spent.by}
    assert by == {
        ("flaky", "agent"): Decimal("0.001"),
        ("m-2", "retry"): Decimal("0.006"),
    }
    errors = await done(session.history(kind="error_boundary"))
    assert [each.data["attempt"] for each in reversed(errors)] == [1, 2]
    assert [each.attempt for each in told if isinstance(each, AttemptFailed)] == [1, 2]
    starts = await done(session.history(kind="iteration_start"))
    assert len(starts) == 1


@both_colours
async def test_a_model_that_keeps_failing_ends_the_run_and_the_next_run_goes_on(
    subject: Subject,
) -> None:
    store = await subject.open()
    session = await done(store.session())
    model = Flaky(*[TimeoutError("no answer")] * 3)
    agent = Agent(session, model, backoff_seconds=0, retries=2)
    error = await raises(ModelFailed, lambda: run(agent, "hi"))
    assert (error.attempts, model.asked) == (3, 3)
    assert isinstance(error.__cause__, TimeoutError)
    assert (await done(session.spent())).usd == Decimal("0.03")
    outcome = await run(agent)
    assert (outcome.text, outcome.spent.attempts, outcome.iteration) == ("at last", 4, 1)


@both_colours
async def test_an_error_that_no_retry_helps_is_not_tried_again(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    model = Flaky(ModelError("bad key", usage=Usage()), RuntimeError("a bug"))
    agent = Agent(session, model, backoff_seconds=0)
    await raises(ModelFailed, lambda: run(agent, "hi"))
    await raises(ModelFailed, lambda: run(agent))
    assert model.asked == 2
    assert [each.state for each in await done(session.spends())] == ["failed", "uncertain"]


@both_colours
async def test_a_secret_in_an_error_is_not_stored(subject: Subject) -> None:
    secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" + "k1L2m3N4o5P6q7R8"
    store = await subject.open()
    session = await done(store.session())
    model = Flaky(ModelError(f"the key {secret} is wrong", usage=Usage()))
    await raises(ModelFailed, lambda: run(Agent(session, model), "hi"))
    stored = [
        *(await done(session.spends())),
        *(await done(session.history(kind="error_boundary"))),
    ]
    assert len(stored) == 3
    assert secret not in repr(stored)
    assert "the key" in repr(stored)


@both_colours
async def test_retries_stay_within_the_budget(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    model = Flaky(*[TimeoutError("no answer")] * 9)
    agent = Agent(session, model, backoff_seconds=0, retries=9, budget=Budget(usd="0.025"))
    await raises(BudgetExceeded, lambda: run(agent, "hi"))
    assert model.asked == 2
    assert (await done(session.spent())).usd == Decimal("0.02")


@both_colours
async def test_what_was_paid_counts_also_when_the_answer_cannot_be_stored(
    subject: Subject,
) -> None:
    class Strange(Flaky):
        def __call__(self, request: Request) -> Response:
            bad = call("look", when=object())
            return Response(blocks=[bad], usage=usage(1, 1, Decimal("0.002")))

    store = await subject.open()
    session = await done(store.session())
    await raises(InvalidValue, lambda: run(Agent(session, Strange()), "hi"))
    (attempt,) = await done(session.spends())
    assert (attempt.state, attempt.usd) == ("settled", Decimal("0.002"))


@both_colours
async def test_a_driver_that_lost_its_session_still_says_what_it_paid(subject: Subject) -> None:
    store = await subject.open()
    session = await done(store.session())
    driven = await done(session.drive("old"))
    stolen: list[Any] = []

    class Thief(Flaky):
        def __call__(self, request: Request) -> Response:
            with holdfast.open(**subject.place) as other:
                found = other.find_session(session.id)
                found.cancel()
                stolen.append(other.session(session.id, reopen=True).spent())
            return super().__call__(request)

    await raises(LeaseLost, lambda: run(Agent(driven, Thief()), "hi"))
    assert stolen[0].uncertain_attempts == 1
    spent = await done(session.spent())
    assert (spent.usd, spent.uncertain_attempts) == (Decimal("0.003"), 0)


def test_a_cancelled_run_leaves_its_attempt_as_uncertain(place: dict[str, Any]) -> None:
    started = asyncio.Event()

    class Slow(Flaky):
        async def acall(self, request: Request) -> Response:
            started.set()
            await asyncio.sleep(60)
            raise AssertionError("it was cancelled")

    async def main() -> None:
        async with await holdfast.aopen(**place) as store:
            session = await store.session()
            task = asyncio.ensure_future(Agent(session, Slow()).arun("hi"))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            spent = await session.spent()
            assert (spent.usd, spent.uncertain_attempts) == (Decimal("0.01"), 1)
            assert (await session.info()).holder is None
            outcome = await Agent(session, Flaky()).arun()
            assert outcome.spent.usd == Decimal("0.006")
            assert outcome.spent.uncertain_attempts == 1

    asyncio.run(main())


@pytest.mark.parametrize("times", ["once", "again and again"])
def test_an_answer_that_came_after_the_cancellation_is_kept(
    place: dict[str, Any], times: str
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with await holdfast.aopen(**place) as store:
            session = await store.session()
            cancelling: list[Any] = []

            class Racing(Flaky):
                def __call__(self, request: Request) -> Response:
                    loop.call_soon_threadsafe(cancelling[0].cancel)
                    while not cancelling[0].cancelling():
                        pass
                    return super().__call__(request)

            model = Racing()
            cancelling.append(asyncio.ensure_future(Agent(session, model).arun("hi")))
            while times != "once" and not cancelling[0].done():
                await asyncio.sleep(0)
                if model.asked:
                    cancelling[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelling[0]
            outcome = await Agent(session, model).arun()
            assert (outcome.text, outcome.is_old, model.asked) == ("at last", True, 1)
            assert outcome.spent.usd == Decimal("0.003")

    asyncio.run(main())


def test_prices_and_limits_are_exact() -> None:
    assert Price(input_usd="0.15", output_usd=0.6).of(1, 1).usd == Decimal("0.00000075")
    assert Budget(usd=0.1).usd == Decimal("0.1")
    bad: list[Any] = [{"usd": -1}, {"usd": "x"}, {"tokens": 1.5}, {"tokens": -1}]
    for wrong in bad:
        with pytest.raises(InvalidArgument):
            Budget(**wrong)


def test_a_scripted_model_counts_the_same_tokens_in_every_process(tmp_path: Path) -> None:
    def spent(name: str) -> Any:
        with holdfast.open(f"sqlite:///{tmp_path}/{name}.db") as store:
            session = store.session()
            script = [call("look", city="Oslo"), "ok"]
            Agent(session, ScriptedModel(script, price=PRICE)).run("go")
            return session.spent()

    assert spent("one") == spent("two")


@both_colours
async def test_an_answer_beyond_a_limit_is_paid_for_once(subject: Subject) -> None:
    """Whoever runs the same turn again, a worker's retry for example, does not pay again."""
    small, large = (holdfast.Limits(value_bytes=size) for size in (2_000, 20_000))
    store = await subject.open(limits=small)
    session = await done(store.session("s"))
    asked: list[int] = []

    def model(request: Request) -> Response:
        asked.append(len(request.messages))
        text = "x" * 10_000 if len(asked) < 3 else "brief"
        return Response(blocks=(TextBlock(text=text),), usage=usage(1, len(text), Decimal(1)))

    def agent(session: Any, **options: Any) -> Agent:
        return Agent(session, model, tools=[], **options)

    error = await raises(LimitExceeded, lambda: run(agent(session), "go", message_id="m"))
    assert "(Limits.value_bytes)" in str(error)
    assert "limit the model's output" in str(error)
    paid = (await done(session.spent())).usd
    assert paid > 0
    for _ in range(2):
        error = await raises(LimitExceeded, lambda: run(agent(session), "go", message_id="m"))
        assert "was not asked again" in str(error)
    assert len(asked) == 1
    spent = await done(session.spent())
    assert (spent.usd, spent.attempts, spent.uncertain_attempts) == (paid, 1, 0)
    # What may help is tried: other instructions, then a store that takes more.
    briefly = partial(run, agent(session, system="Be brief."), "go", message_id="m")
    await raises(LimitExceeded, briefly)
    assert len(asked) == 2
    again = await done((await subject.open(limits=large)).session("s"))
    outcome = await run(agent(again, system="Be brief."), "go", message_id="m")
    assert (outcome.text, len(asked)) == ("brief", 3)
    assert [each.state for each in await done(again.spends())] == ["settled"] * 3


@both_colours
async def test_after_an_answer_beyond_a_limit_a_new_message_is_asked(subject: Subject) -> None:
    store = await subject.open(limits=holdfast.Limits(value_bytes=2_000))
    session = await done(store.session("s"))
    texts = ["x" * 10_000, "brief"]

    def model(request: Request) -> Response:
        if not any(message.results for message in request.messages):
            return Response(blocks=(call("look", city="Rome"),))
        return Response(blocks=(TextBlock(text=texts.pop(0)),))

    agent = Agent(session, model, tools=World(subject.directory).tools())
    await raises(LimitExceeded, lambda: run(agent, "go"))
    error = await raises(LimitExceeded, lambda: run(agent, None))
    assert "was not asked again" in str(error)
    assert (await run(agent, "briefly, please")).text == "brief"
