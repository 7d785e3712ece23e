"""What models cost, on the command line, on both databases."""

from __future__ import annotations

from typing import Any

import holdfast
from tests.faces.test_cli_sessions import Run, data, lines, quick

__all__ = ["quick"]


def spent(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        one, two = store.session("session-one"), store.session("session-two")
        one.spend("big", usd="0.5", input_tokens=10, output_tokens=2)
        one.spend("big", source="retry", state="uncertain", usd="0.25")
        two.spend("small", usd="0.000000001")


def test_attempts_are_listed_by_session_and_state(place: dict[str, Any], quick: Run) -> None:
    spent(place)
    table = lines(quick("spend", "list"))
    assert table[0].split()[:7] == [
        "number", "session", "model", "source", "state", "tokens", "usd",
    ]  # fmt: skip
    assert table[1].split()[:7] == ["1", "session-one", "big", "agent", "settled", "12", "0.5"]
    found = data(quick("spend", "list", "--session", "session-one", "--state=uncertain", "--json"))
    assert [each["number"] for each in found["spend"]] == [2]
    assert (found["spend"][0]["usd"], found["next_after"]) == ("0.25", None)
    page = quick("spend", "list", "--limit", "2")
    assert "There may be more: --after 2" in page.stdout
    assert [
        each["number"] for each in data(quick("spend", "list", "--after=2", "--json"))["spend"]
    ] == [3]
    assert quick("spend", "list", "--state", "paid").returncode != 0


def test_spend_is_summed_by_session_model_and_day(place: dict[str, Any], quick: Run) -> None:
    spent(place)
    by_session = data(quick("spend", "sums", "--by", "session", "--json"))
    assert [(each["name"], each["usd"], each["uncertain_usd"]) for each in by_session["sums"]] == [
        ("session-one", "0.75", "0.25"),
        ("session-two", "0.000000001", "0"),
    ]
    table = lines(quick("spend", "sums"))
    assert table[1].split() == ["big", "2", "10", "2", "0.75", "0.25", "0"]
    (day,) = data(quick("spend", "sums", "--by=day", "--session=session-one", "--json"))["sums"]
    assert (day["attempts"], len(day["name"])) == (2, 10)


def test_spend_is_found_by_the_beginning_of_an_id_and_after_its_session_was_deleted(
    place: dict[str, Any], quick: Run
) -> None:
    spent(place)
    for command, member in (("list", "spend"), ("sums", "sums")):
        found = data(quick("spend", command, "--session", "session-t", "--json"))[member]
        assert [each["usd"] for each in found] == ["0.000000001"]
    with holdfast.open(**place) as store:
        store.session("session-two").delete()
    for option in ("--session", "--root"):
        (gone,) = data(quick("spend", "sums", option, "session-two", "--json"))["sums"]
        assert gone["name"] == "small"


def test_a_page_of_sums_says_where_the_next_begins(place: dict[str, Any], quick: Run) -> None:
    with holdfast.open(**place) as store:
        for name in ("a session", "another"):
            store.session(name).spend("big", usd="1")
    page = quick("spend", "sums", "--by=session", "--limit=1")
    assert "There may be more: --after 'a session'" in page.stdout
    first = data(quick("spend", "sums", "--by=session", "--limit=1", "--json"))
    assert ([each["name"] for each in first["sums"]], first["next_after"]) == (
        ["a session"],
        "a session",
    )
    rest = data(quick("spend", "sums", "--by=session", "--after", "a session", "--json"))
    assert ([each["name"] for each in rest["sums"]], rest["next_after"]) == (["another"], None)


def test_an_uncertain_attempt_is_corrected_once(place: dict[str, Any], quick: Run) -> None:
    spent(place)
    said = lines(quick("spend", "correct", "2", "--usd", "0.01", "--by", "jo", "--note", "invoice"))
    assert said == ["Model call 2 cost $0.01; it was counted at $0.25."]
    fixed = data(quick("spend", "correct", "2", "--usd", "0.01", "--json"))
    assert (fixed["state"], fixed["details"]["corrected_by"]) == ("settled", "jo")
    assert quick("spend", "correct", "1", "--usd", "9").returncode == 4
    missing = quick("spend", "correct", "99", "--usd", "9")
    assert (missing.returncode, "no model call number 99" in missing.stderr) == (3, True)
    with holdfast.open(**place) as store:
        assert str(store.find_session("session-one").spent().usd) == "0.51"


def test_a_session_shows_what_it_cost(place: dict[str, Any], quick: Run) -> None:
    spent(place)
    shown = data(quick("sessions", "show", "session-one", "--json"))
    assert (shown["spent_usd"], shown["uncertain_usd"]) == ("0.75", "0.25")
    assert (shown["tokens"], shown["model_calls"], shown["unpriced_calls"]) == (12, 2, 0)
    assert any(
        line.split() == ["spent", "usd", "0.75"]
        for line in lines(quick("sessions", "show", "session-one"))
    )
