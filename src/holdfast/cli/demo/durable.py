"""The agent that the demo kills: a loop of `holdfast.agent`, with its session in a store.

It runs as `python -m holdfast.cli.demo.durable TRIP NUMBER PORT DIRECTORY POINT`, with the store
in HOLDFAST_URL, finishes what an earlier process of the trip began, and stops at the point.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ...agent import Agent, Answered, Called, Calling, Resumed, Saved
from ...store import open
from ...testing.crashes import CrashPoints
from .payments import Payments
from .telling import Point, Stand, tell
from .trip import CHARGE, SYSTEM, destination, make_tools, model, wish


class Probe(CrashPoints):
    """Determines from the store's own statements how far the charge has come."""

    def __init__(self, stand: Stand) -> None:
        super().__init__()
        self._stand = stand
        self._reached: set[Point] = set()
        self.is_charging = False

    def visit(self, point: Any) -> None:
        """Stop before the intent's first statement, or after the chosen commit."""
        if point.boundary == "commit" and point.moment == "after":
            for reached in self._reached:
                self._stand.reach(reached)
            self._reached.clear()
        if point.boundary != "statement":
            return
        name = point.call.rpartition(".")[2]
        if name == "take" and self.is_charging:
            self._stand.reach("before_intent")
            self._reached.add("after_intent")
        elif name == "finish":
            self._reached.add("after_result")
        elif name == "end_turn" and self.is_charging:
            self._reached.add("after_checkpoint")


def report(progress: object, probe: Probe) -> None:
    """Report the progress of the agent's loop to the demo."""
    match progress:
        case Resumed():
            tell("began", messages=progress.messages, dangling_calls=progress.dangling_calls)
        case Answered():
            tell("answered", text=progress.message.text, tokens=progress.usage.tokens)
        case Calling():
            probe.is_charging = progress.call.name == CHARGE
        case Called():
            is_replay = progress.result.replay_of is not None
            tell("called", tool=progress.call.name, is_replay=is_replay)
        case Saved():
            tell("saved", version=progress.version)


def main(trip: str, number: str, port: str, directory: str, point: str) -> None:
    """Plan the trip, or continue planning it."""
    stand = Stand(point)
    probe = Probe(stand)
    place = destination(int(number))
    with open(hooks=probe.hooks) as store:
        agent = Agent(
            store.session(
                trip, agent="traveller", metadata={"title": f"A trip to {place}"}, reopen=True
            ),
            model(place),
            tools=make_tools(trip, Payments(int(port)), Path(directory), stand),
            system=SYSTEM,
            # Only one process at a time has this name, so it takes over from a dead one at once.
            instance=f"demo-{trip}",
            on_progress=lambda progress: report(progress, probe),
        )
        outcome = agent.run(wish(place), message_id="wish")
    tell("done", text=outcome.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
