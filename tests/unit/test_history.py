"""The judge of histories finds what it must, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import CommitUnknown, InvalidArgument
from holdfast.testing.history import History, Recorded, lost_or_doubled, out_of_order, read


def call(id: str, outcome: str, asked: int = 0, answered: int = 0) -> Recorded:
    return Recorded(id, "add", {}, asked, outcome, None, answered)  # type: ignore[arg-type]


def test_a_sound_history_has_no_violation() -> None:
    calls = [call("a", "ok"), call("b", "fail"), call("c", "info"), call("d", "info")]
    assert lost_or_doubled(calls, ["a", "c"]) == []


def test_lost_doubled_refused_and_invented_calls_are_named() -> None:
    calls = [call("a", "ok"), call("b", "fail"), call("c", "ok")]
    assert lost_or_doubled(calls, ["b", "c", "c", "x"]) == [
        "c is there 2 times",
        "a was acknowledged but is lost",
        "b was refused but is there",
        "x was never asked for",
    ]


def test_real_time_order_is_judged() -> None:
    calls = [call("a", "ok", 1, 2), call("b", "ok", 3, 5), call("c", "ok", 4, 6)]
    assert out_of_order(calls, ["a", "c", "b"]) == []
    assert out_of_order(calls, ["b", "a", "c"]) == ["a ended before b began but comes after it"]


def test_a_call_without_an_answer_is_unknown(tmp_path: Path) -> None:
    history = History(tmp_path)
    with history.call("add", amount=1) as recorded:
        recorded.result = 7
    with pytest.raises(InvalidArgument), history.call("add"):
        raise InvalidArgument
    with pytest.raises(CommitUnknown), history.call("add"):
        raise CommitUnknown(id="w:1")
    with pytest.raises(KeyboardInterrupt), history.call("add"):
        raise KeyboardInterrupt
    calls = read(tmp_path)
    assert [found.outcome for found in calls] == ["ok", "fail", "info", "info"]
    assert (calls[0].result, calls[0].arguments) == (7, {"amount": 1})


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    history = History(tmp_path)
    with history.call("add"):
        pass
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    asked = whole.index(b"\n") + 1
    found = []
    for length in (asked - 1, asked, len(whole) - 1, len(whole)):
        file.write_bytes(whole[:length])
        found.append([call.outcome for call in read(tmp_path)])
    assert found == [[], ["info"], ["info"], ["ok"]]
