"""The benchmark of killed agents: every kill comes when the charge is booked, and it is counted."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.killed import SCENES, book
from benchmarks.killed_picture import draw
from benchmarks.measure import Contestant, Figures, Table

KILLS = 2
NOTHING_KEPT = {"charges": KILLS + 1, "kills": KILLS, "processes": KILLS + 1, "finished": 1}
ONCE = {"charges": 1, "kills": KILLS, "processes": KILLS + 1, "finished": 1}
PARKED = {"charges": 1, "kills": 1, "processes": 2, "finished": 0}


@pytest.mark.parametrize(
    ("agent", "honours_keys", "found"),
    [
        ("plain", False, NOTHING_KEPT),
        ("plain-key", True, ONCE),
        ("holdfast", False, PARKED),
        ("holdfast-verify", False, ONCE),
        ("holdfast-key", True, ONCE),
        ("holdfast-key", False, NOTHING_KEPT),
    ],
)
def test_charges_are_counted_by_the_receiver(
    agent: str, honours_keys: bool, found: dict[str, float]
) -> None:
    assert book(agent, honours_keys, KILLS) == found


def test_the_picture_shows_a_coin_for_each_charge_of_the_worst_trip() -> None:
    trips: list[Figures] = [
        {"charges": 1, "kills": 3, "finished": 1},
        {"charges": 4, "kills": 3, "finished": 1},
    ]
    parked: list[Figures] = [{"charges": 1, "kills": 1, "finished": 0}] * 2
    rounds = {"LangGraph & others": trips, "Holdfast": parked}
    contestants = [Contestant(name, dict) for name in rounds]
    picture = draw([Table("No keys", "charges", contestants, rounds)])
    root = ElementTree.fromstring(picture)
    kinds = [each.get("class") for each in root.iter() if each.tag.endswith("circle")]
    assert kinds == ["once", "again", "again", "again", "once"]
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")]
    assert "LangGraph & others" in texts
    assert "4 charges, 3 kills" in texts
    assert "1 charge, 1 kill; then a person decides" in texts


def test_the_published_picture_shows_every_agent() -> None:
    picture = Path(__file__).parents[2] / "docs" / "pictures" / "killed.svg"
    root = ElementTree.parse(picture).getroot()
    names = [each.text for each in root.iter() if each.get("class") == "name"]
    assert names == [name for scene in SCENES for name in scene.agents]
