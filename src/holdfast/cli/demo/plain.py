"""The same agent without Holdfast: its conversation is a list in memory, lost with the process.

It runs as `python -m holdfast.cli.demo.plain TRIP NUMBER PORT DIRECTORY POINT`.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

from ...agent import Message, Request, TextBlock, ToolCall, ToolResult, ToolSpec
from ...effects import Tool
from .payments import Payments
from .telling import Stand, tell
from .trip import CHARGE, SYSTEM, destination, make_tools, model, wish


def main(trip: str, number: str, port: str, directory: str, point: str) -> None:
    """Plan the trip, always from the beginning."""
    stand = Stand(point)
    place = destination(int(number))
    ask = model(place)
    found = make_tools(trip, Payments(int(port)), Path(directory), stand)
    tools = {tool.name: tool for tool in found}
    specs = tuple(
        ToolSpec(name=tool.name, description=tool.description, parameters=tool.parameters)
        for tool in found
    )
    messages = [Message(role="user", blocks=(TextBlock(text=wish(place)),))]
    tell("began", messages=0, dangling_calls=0)
    while True:
        response = ask(Request(messages=tuple(messages), system=SYSTEM, tools=specs))
        answer = Message(role="assistant", blocks=tuple(response.blocks))
        tell("answered", text=answer.text, tokens=response.usage.tokens)
        messages.append(answer)
        for call in answer.calls:
            messages.append(_run(tools[call.name], call, stand))
            if call.name == CHARGE:
                stand.reach("after_checkpoint")
        if not answer.calls:
            tell("done", text=answer.text)
            return


def _run(tool: Tool[..., Any], call: ToolCall, stand: Stand) -> Message:
    """Call a tool; nothing is known about an earlier process and the reference that it used."""
    is_charge = tool.name == CHARGE
    if is_charge:
        stand.reach("before_intent")
        stand.reach("after_intent")
    key = {"idempotency_key": uuid.uuid4().hex} if tool.takes_key else {}
    content = tool(**call.arguments, **key)
    if is_charge:
        stand.reach("after_result")
    tell("called", tool=tool.name, is_replay=False)
    return Message(role="tool", blocks=(ToolResult(call_id=call.call_id, content=content),))


if __name__ == "__main__":
    main(*sys.argv[1:])
