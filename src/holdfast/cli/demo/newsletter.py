"""A newsletter system with two bugs, and what an exploration of it finds."""

from __future__ import annotations

from typing import Any

from ...store import Store
from ...worlds import MemorySystem, World, action, explore, invariant

EXPLORED = "holdfast.cli.demo.newsletter:make_world"


def make_world() -> World:
    """Return a world with an empty newsletter."""
    return World({"letter": MemorySystem({"text": "none", "is_approved": False, "sent": []})})


def _letter(world: World) -> dict[str, Any]:
    system = world.systems["letter"]
    assert isinstance(system, MemorySystem)
    return system.data


@action(requires=lambda world: _letter(world)["text"] == "none")
def write(world: World) -> None:
    """Write the text."""
    _letter(world)["text"] = "draft"


@action(requires=lambda world: _letter(world)["text"] == "draft")
def check_facts(world: World) -> None:
    """Check the facts of the text."""
    _letter(world)["text"] = "checked"


@action(requires=lambda world: _letter(world)["text"] == "checked")
def edit(world: World) -> None:
    """Change a checked text; the approval should be withdrawn, but is not."""
    _letter(world)["text"] = "draft"


@action(requires=lambda world: _letter(world)["text"] == "checked")
def approve(world: World) -> None:
    """Approve the text."""
    _letter(world)["is_approved"] = True


@action(
    requires=lambda world: _letter(world)["is_approved"] and len(_letter(world)["sent"]) < 2,
)
def send(world: World) -> None:
    """Send the text; again, if the first response was lost."""
    _letter(world)["sent"].append(_letter(world)["text"])


@action(requires=lambda world: _letter(world)["text"] != "none" and not _letter(world)["sent"])
def discard(world: World) -> None:
    """Start over."""
    _letter(world).update(text="none", is_approved=False)


@invariant(severity="critical", message="an unchecked text was sent to all readers")
def only_checked_text_is_sent(world: World) -> bool:
    """Check what was sent."""
    return "draft" not in _letter(world)["sent"]


@invariant(severity="medium", message="readers got the newsletter twice")
def readers_get_it_once(world: World) -> bool:
    """Count what was sent."""
    return len(_letter(world)["sent"]) < 2


ACTIONS = [write, check_facts, edit, approve, send, discard]
INVARIANTS = [only_checked_text_is_sent, readers_get_it_once]


def explore_newsletter(store: Store) -> None:
    """Explore the newsletter, and store the exploration."""
    explore(make_world, ACTIONS, INVARIANTS, store=store, id=EXPLORED, shrinks=False)
