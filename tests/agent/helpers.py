"""What the agent's tests share: tools that leave lines in a file, and runs in both colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.agent import Agent, Message, Outcome, Price, Request, Response, ScriptedModel, Usage
from holdfast.effects.tools import Landed, NotLanded, Tool, tool

PRICE = Price(input_usd=3, output_usd=15)


class World:
    """A file in which tools and models leave a line for each thing that really happened."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "world.txt"
        self.path.touch()

    def note(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def count(self, start: str) -> int:
        return sum(line.startswith(start) for line in self.lines)

    def tools(self, **rules: Any) -> list[Tool[..., Any]]:
        """Return a tool of each kind; what mutates can be verified."""

        def find(args: dict[str, Any], idempotency_key: str) -> object:
            line = f"mail {args['to']} {idempotency_key}"
            return Landed({"sent": args["to"]}) if line in self.lines else NotLanded()

        @tool(effect="read", **rules)
        def look(city: str) -> dict[str, Any]:
            """Look a city up."""
            self.note(f"look {city}")
            return {"city": city, "price": 120}

        @tool(effect="write", **rules)
        def write(path: str, text: str) -> str:
            """Write a file."""
            self.note(f"write {path} {text}")
            return f"{len(text)} characters"

        @tool(effect="mutate", verify=find, **rules)
        def mail(to: str, *, idempotency_key: str) -> dict[str, Any]:
            """Send a mail."""
            self.note(f"mail {to} {idempotency_key}")
            return {"sent": to}

        return [look, write, mail]

    def model(self, script: Any, **options: Any) -> NotingModel:
        return NotingModel(self, script, **options)


class NotingModel(ScriptedModel):
    """A scripted model that leaves a line for each time it is really asked."""

    def __init__(self, world: World, script: Any, **options: Any) -> None:
        super().__init__(script, **{"price": PRICE, **options})
        self._world = world

    def __call__(self, request: Request) -> Response:
        response = super().__call__(request)
        self._world.note(f"asked {response.usage.usd}")
        return response


async def run(agent: Agent, message: str | None = None, **options: Any) -> Outcome:
    """Run an agent in the colour of its session."""
    if agent.session.runtime.is_async:
        return await agent.arun(message, **options)
    return agent.run(message, **options)


def usage(input_tokens: int = 0, output_tokens: int = 0, usd: Any = None) -> Usage:
    return Usage(input_tokens=input_tokens, output_tokens=output_tokens, usd=usd)


def results(messages: list[Message]) -> list[Any]:
    return [result.content for message in messages for result in message.results]
