"""The trip that is planned: what the model says and what the tools do, the same in both loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...agent import Block, Price, ScriptedModel, TextBlock, call
from ...effects import Landed, NotLanded, Tool, tool
from .payments import Payments
from .telling import Stand, tell

DESTINATIONS = ("Oslo", "Bergen", "Turku", "Malmo", "Aarhus")
CENTS = 14_900
CHARGE = "charge_card"
SYSTEM = "You plan trips. Look for trains, write the itinerary, then pay with the traveller's card."
# How long a request may still be in progress at the payment server after its sender has died.
SETTLE_SECONDS = 0.3


def destination(number: int) -> str:
    """Return the destination of a trip."""
    return DESTINATIONS[(number - 1) % len(DESTINATIONS)]


def wish(place: str) -> str:
    """Return the traveller's message."""
    return f"Plan a trip to {place} on Friday and book it."


def model(place: str) -> ScriptedModel:
    """Return a model that responds the same in every process."""
    itinerary = f"# Friday\n\n08:12 train to {place}, seat by the window. Hotel by the harbour.\n"
    script: list[str | list[Block]] = [
        [TextBlock(text="Searching for trains."), call("find_trains", to=place)],
        [
            TextBlock(text="Writing the itinerary."),
            call("write_file", name="itinerary.md", text=itinerary),
        ],
        [TextBlock(text="Paying for the ticket."), call(CHARGE, cents=CENTS)],
        f"Your trip to {place} is booked.",
    ]
    return ScriptedModel(script, name="scripted", price=Price(input_usd=3, output_usd=15))


def make_tools(
    trip: str, payments: Payments, directory: Path, stand: Stand
) -> list[Tool[..., Any]]:
    """Return the agent's tools: one reads, one writes a file, one charges a card."""

    @tool(effect="read")
    def find_trains(to: str) -> list[dict[str, Any]]:
        """Find the trains to a town."""
        return [{"to": to, "at": at, "cents": CENTS} for at in ("08:12", "12:40")]

    @tool(effect="write")
    def write_file(name: str, text: str) -> str:
        """Write a file."""
        (directory / Path(name).name).write_text(text)
        return f"{len(text)} characters written"

    def receipt(charge: dict[str, Any]) -> dict[str, Any]:
        return {"charge": charge["id"], "cents": charge["cents"]}

    def is_charged(arguments: dict[str, Any], idempotency_key: str) -> Landed | NotLanded:
        """Check whether the server has booked the charge with this reference."""
        found = [each for each in payments.charges(trip) if each["reference"] == idempotency_key]
        tell("verified", is_charged=bool(found))
        return Landed(receipt(found[0])) if found else NotLanded()

    @tool(effect="mutate", verify=is_charged, settle_seconds=SETTLE_SECONDS)
    def charge_card(cents: int, *, idempotency_key: str) -> dict[str, Any]:
        """Charge the traveller's card."""
        charge = payments.charge(trip, idempotency_key, cents)
        tell("charged", charge=charge["id"], cents=cents)
        stand.reach("after_effect")
        return receipt(charge)

    return [find_trains, write_file, charge_card]
