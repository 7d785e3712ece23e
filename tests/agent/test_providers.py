"""Real providers through Pydantic AI: nothing is lost both ways, and its offline models run."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import exceptions, messages
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import RequestUsage

from holdfast.agent import (
    Agent,
    Message,
    ModelError,
    Price,
    ReasoningBlock,
    Request,
    TextBlock,
    ToolCall,
    ToolResult,
    read_message,
    read_transcript,
)
from holdfast.agent.providers import (
    ProviderModel,
    failure,
    from_response,
    to_history,
    to_response,
)
from holdfast.codec import Codec
from holdfast.errors import InvalidArgument, ModelFailed
from holdfast.testing.subject import Subject, done, raises
from tests.agent.helpers import World, results, run
from tests.checkpoints.colours import both_colours

WHEN = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
FULL = messages.ModelResponse(
    parts=[
        messages.ThinkingPart(
            content="hm", id="t1", signature="c2ln", provider_name="anthropic",
            provider_details={"redacted": False},
        ),
        messages.ThinkingPart(content="", signature="b25seQ=="),
        messages.TextPart(content="I look.", id="x1", provider_details={"a": [1, None]}),
        messages.TextPart(content=""),
        messages.ToolCallPart("look", {"city": "Oslo", "n": 2}, "call_1", id="fc_1"),
        messages.ToolCallPart("look", '{"city": "Rome"}', "call_2"),
        messages.ToolCallPart("look", None, "call_3"),
    ],
    usage=RequestUsage(
        input_tokens=100, output_tokens=20, cache_read_tokens=7, details={"thinking": 5},
        cost=Decimal("0.0123"),
    ),
    model_name="claude-x",
    timestamp=WHEN,
    provider_name="anthropic",
    provider_url="https://api.example.com",
    provider_details={"stop": "tool_use"},
    provider_response_id="msg_1",
    finish_reason="tool_call",
    metadata={"trace": "t"},
)  # fmt: skip


def stored(response: messages.ModelResponse) -> Message:
    """Return a response as it comes back out of a store."""
    ours = from_response(response)
    message = Message(
        id="m",
        role="assistant",
        created_at=1,
        blocks=tuple(ours.blocks),
        metadata={"model": ours.model, **ours.metadata},
    )
    codec = Codec()
    return read_message(codec.decode(codec.encode(message.to_plain())))


def test_a_response_comes_back_to_its_provider_as_it_was() -> None:
    assert to_response(stored(FULL)) == FULL


def test_a_responses_parts_become_blocks() -> None:
    message = stored(FULL)
    assert [block.kind for block in message.blocks] == [
        "reasoning", "reasoning", "text", "text", "tool_call", "tool_call", "tool_call",
    ]  # fmt: skip
    thought = message.blocks[0]
    assert isinstance(thought, ReasoningBlock)
    assert (thought.text, thought.metadata["signature"]) == ("hm", "c2ln")
    assert [each.arguments for each in message.calls] == [
        {"city": "Oslo", "n": 2}, '{"city": "Rome"}', None,
    ]  # fmt: skip
    assert message.metadata["provider"]["usage"]["cache_read_tokens"] == 7


def test_a_part_that_no_block_can_hold_is_a_clear_error() -> None:
    image = messages.FilePart(messages.BinaryContent(b"x", media_type="image/png"))
    with pytest.raises(ModelError, match="a part of kind 'file'"):
        from_response(messages.ModelResponse(parts=[image]))


def test_a_conversation_becomes_requests_and_responses_in_turn() -> None:
    def said(role: Any, *blocks: Any) -> Message:
        return Message(role=role, created_at=1_767_323_045_678, blocks=blocks)

    request = Request(
        system="Be brief.",
        messages=(
            said("system", TextBlock(text="Today is Friday.")),
            said("user", TextBlock(text="Oslo?")),
            said("assistant", ToolCall(call_id="a", name="look", arguments={"city": "Oslo"})),
            said("tool", ToolResult(call_id="a", content={"price": 120})),
            said("tool", ToolResult(call_id="b", content="no", is_error=True)),
            said("user", TextBlock(text="Well?")),
        ),
    )
    first, answer, second = to_history(request)
    assert isinstance(first, messages.ModelRequest)
    assert isinstance(answer, messages.ModelResponse)
    assert isinstance(second, messages.ModelRequest)
    assert (first.instructions, second.instructions) == ("Be brief.", "Be brief.")
    assert [part.part_kind for part in first.parts] == ["system-prompt", "user-prompt"]
    assert [part.part_kind for part in second.parts] == [
        "tool-return", "tool-return", "user-prompt",
    ]  # fmt: skip
    result, refused = second.parts[:2]
    assert isinstance(result, messages.ToolReturnPart)
    assert isinstance(refused, messages.ToolReturnPart)
    assert (result.tool_name, result.content, result.outcome) == ("look", {"price": 120}, "success")
    assert refused.outcome == "failed"
    assert answer.parts[0] == messages.ToolCallPart("look", {"city": "Oslo"}, "a")


@both_colours
async def test_the_clients_test_model_runs_the_loop(subject: Subject) -> None:
    """It calls every tool with arguments that it makes up from our schema, then answers."""
    world = World(subject.directory)
    store = await subject.open()
    session = await done(store.session())
    agent = Agent(session, ProviderModel(TestModel()), tools=world.tools(), system="Be good.")
    outcome = await run(agent, "go")
    assert (world.count("look"), world.count("write"), world.count("mail")) == (1, 1, 1)
    assert '"look":{"city":' in outcome.text
    (used,) = outcome.spent.by
    assert (used.model, used.attempts) == ("test", 2)
    assert used.input_tokens > 0
    again = await done(session.spends())
    assert [each.state for each in again] == ["settled", "settled"]
    # Its call ids are the same in every run; in a transcript they stay unique.
    fork = await done(session.fork(1))
    assert (await run(Agent(fork, ProviderModel(TestModel()), tools=world.tools()))).text


@both_colours
async def test_the_clients_function_model_sees_the_whole_conversation(subject: Subject) -> None:
    world = World(subject.directory)
    seen: list[Any] = []

    def answer(history: list[messages.ModelMessage], info: AgentInfo) -> messages.ModelResponse:
        seen.append((list(history), info))
        if len(history) == 1:
            return messages.ModelResponse(
                parts=[
                    messages.ThinkingPart(content="hm", signature="c2ln"),
                    messages.ToolCallPart("look", {"city": "Oslo"}, "call_1"),
                    messages.ToolCallPart("look", {"town": "Rome"}, "call_2"),
                ]
            )
        return messages.ModelResponse(parts=[messages.TextPart("120.")])

    store = await subject.open()
    session = await done(store.session())
    model = ProviderModel(FunctionModel(answer), price=Price(input_usd=1, output_usd=1))
    outcome = await run(
        Agent(session, model, tools=world.tools(), settings={"temperature": 0.5}), "Oslo?"
    )
    assert outcome.text == "120."
    assert outcome.spent.usd > 0
    history, info = seen[-1]
    assert [type(each).__name__ for each in history] == [
        "ModelRequest", "ModelResponse", "ModelRequest",
    ]  # fmt: skip
    assert history[1].parts[0] == messages.ThinkingPart(content="hm", signature="c2ln")
    assert [part.outcome for part in history[2].parts] == ["success", "failed"]
    assert [tool.name for tool in info.function_tools] == ["look", "write", "mail"]
    assert info.model_settings == {"temperature": 0.5}
    latest = await done(session.latest())
    found = read_transcript(latest["transcript"])
    assert results(found)[0] == {"city": "Oslo", "price": 120}
    assert found[1].metadata["provider"]["model_name"].startswith("function:")


@both_colours
async def test_errors_of_a_provider_are_retried_and_counted(subject: Subject) -> None:
    errors = [
        exceptions.ModelHTTPError(429, "m"),
        exceptions.ModelConnectionError("m", "the line broke"),
        exceptions.ModelHTTPError(401, "m"),
    ]

    def answer(history: list[messages.ModelMessage], info: AgentInfo) -> messages.ModelResponse:
        if errors:
            raise errors.pop(0)
        return messages.ModelResponse(parts=[messages.TextPart("hi")])

    store = await subject.open()
    session = await done(store.session())
    model = ProviderModel(FunctionModel(answer), price=Price(output_usd=1))
    agent = Agent(session, model, backoff_seconds=0, settings={"max_tokens": 1000})
    await raises(ModelFailed, lambda: run(agent, "hello"))
    first, second, third = await done(session.spends())
    assert [each.state for each in (first, second, third)] == ["failed", "uncertain", "failed"]
    assert [each.usd for each in (first, second, third)] == [0, Decimal("0.001"), 0]
    assert (await run(agent)).text == "hi"


def test_errors_say_whether_to_try_again_and_whether_they_were_paid_for() -> None:
    def said(error: Exception) -> tuple[bool, bool]:
        ours = failure(error)
        return ours.is_retryable, ours.usage is not None

    assert said(exceptions.ModelHTTPError(500, "m")) == (True, True)
    assert said(exceptions.ModelHTTPError(400, "m")) == (False, True)
    assert said(exceptions.UserError("no key")) == (False, True)
    assert said(TimeoutError()) == (True, False)
    assert said(exceptions.UnexpectedModelBehavior("?")) == (False, False)


def test_a_known_model_has_a_price_and_an_unknown_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(history: list[messages.ModelMessage], info: AgentInfo) -> messages.ModelResponse:
        raise AssertionError("nobody is asked")

    known = FunctionModel(answer, model_name="gpt-4o")
    monkeypatch.setattr(known, "_system", "openai")
    request = Request(messages=(Message(role="user", blocks=(TextBlock(text="x" * 4000),)),))
    estimate = ProviderModel(known, settings={"max_tokens": 1000}).estimate(request)
    assert (estimate.input_tokens, estimate.output_tokens) == (1000, 1000)
    assert estimate.usd is not None
    assert estimate.usd > 0
    assert ProviderModel(FunctionModel(answer, model_name="mine")).estimate(request).usd is None


def test_a_model_that_cannot_be_had_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="cannot be used"):
        ProviderModel("nobody:nothing")


def test_the_package_loads_without_the_client(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = """
import sys
import holdfast.agent
assert not any(name.startswith("pydantic") for name in sys.modules)
sys.modules["pydantic_ai"] = None
try:
    import holdfast.agent.providers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'holdfast-agents[models]'" in done.stdout
