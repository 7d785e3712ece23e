"""`holdfast state` on the command line, on both databases."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.faces.test_cli_sessions import Run, data, quick

__all__ = ["quick"]


@pytest.fixture
def filled(place: dict[str, Any]) -> dict[str, Any]:
    with holdfast.open(**place) as store:
        state = store.session("report-one").state
        state.set("topics", ["a"])
        state.increment("n", 3)
    return place


def test_keys_are_written_and_read(filled: dict[str, Any], quick: Run) -> None:
    whole = data(quick("state", "get", "report-one", "--json"))
    assert set(whole.pop("times")) == {"n", "topics"}
    assert whole == {
        "root_id": "report-one", "version": 2, "document": {"n": 3, "topics": ["a"]},
        "versions": {"n": 1, "topics": 1},
        "writers": {"n": "report-one", "topics": "report-one"},
    }  # fmt: skip
    assert data(quick("state", "set", "report-one", "k", '{"a": [1]}', "--json"))["version"] == 1
    assert quick("state", "get", "report-one", "k").stdout == '{\n  "a": [\n    1\n  ]\n}\n'
    assert quick("state", "increment", "report-one", "n", "0.5").stdout == "n is 3.5, version 2.\n"
    quick("state", "append", "report-one", "topics", '["b"]')
    quick("state", "merge", "report-one", "k", '{"a": null, "b": 1}')
    repeated = ("state", "set", "report-one", "new", "1", "--idempotency-key", "x")
    assert quick(*repeated).stdout == quick(*repeated).stdout
    assert data(quick("state", "keys", "report-one", "--json")) == {
        "keys": ["k", "n", "new", "topics"]
    }
    by_it = quick("state", "keys", "report-one", "--updated-by", "report-o", "--json")
    assert data(by_it) == {"keys": ["k", "n", "new", "topics"]}
    by_nobody = quick("state", "keys", "report-one", "--updated-by", "long-gone")
    assert by_nobody.stdout == "No keys.\n"
    deleted = quick("state", "delete", "report-one", "new", "--yes")
    assert deleted.stdout == "new is deleted: version 2, sequence 8.\n"
    with holdfast.open(**filled) as store:
        document = store.find_session("report-one").state.snapshot().document
        assert document == {"k": {"b": 1}, "n": 3.5, "topics": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("it's", """A string needs its quotes: '"it'"'"'s"'"""),
        ("{to: ann}", "Expecting property name enclosed in double quotes"),
    ],
)
def test_text_that_is_not_json_is_refused(
    filled: dict[str, Any], quick: Run, text: str, told: str
) -> None:
    for argument, words in {
        "VALUE": ("state", "set", "report-one", "k", text),
        "ITEMS": ("state", "append", "report-one", "topics", text),
        "PATCH": ("state", "merge", "report-one", "k", text),
        "INPUT": ("work", "submit", "mail", text),
    }.items():
        refused = quick(*words, "--json")
        assert refused.returncode == 2
        error = json.loads(refused.stderr)
        assert error["message"].startswith(f"{argument} is not JSON text: Expecting ")
        assert error["path"] == argument
        assert told in error["message"]
        assert ("its quotes: " in error["message"]) == (text == "it's")
    assert data(quick("state", "keys", "report-one", "--json")) == {"keys": ["n", "topics"]}


def test_rules_are_set_shown_and_kept_to(filled: dict[str, Any], quick: Run) -> None:
    assert quick("state", "rules", "report-one").stdout == "No rules.\n"
    rule = (
        "state",
        "set-rule",
        "report-one",
        "n",
        "--schema",
        '{"maximum": 5}',
        "--reducer",
        "sum",
    )
    assert quick(*rule).stdout == "n has this rule now.\n"
    assert data(quick("state", "reduce", "report-one", "n", "-1", "--json"))["value"] == 2
    refused = quick("state", "set", "report-one", "n", "6")
    assert refused.returncode == 2
    assert "6 is greater than the maximum of 5" in refused.stderr
    assert quick("state", "set-rule", "report-one", "n", "--reducer", "avg").returncode == 2
    [found] = data(quick("state", "rules", "report-one", "--json"))["rules"]
    assert (found["schema"], found["reducer"]) == ({"maximum": 5}, "sum")
    assert '{"maximum":5}' in quick("state", "rules", "report-one").stdout
    quick("state", "delete-rule", "report-one", "n")
    assert quick("state", "set", "report-one", "n", "6").returncode == 0
    assert quick("state", "delete-rule", "report-one", "n").returncode == 3


def test_the_past_is_shown_and_restored(filled: dict[str, Any], quick: Run, tmp_path: Path) -> None:
    quick("state", "set", "report-one", "topics", '"none"')
    assert quick("state", "get", "report-one", "topics", "--at", "1").stdout == '[\n  "a"\n]\n'
    found = data(quick("state", "history", "report-one", "topics", "--limit", "1", "--json"))
    assert (found["history"][0]["value"], found["next_before"]) == ("none", 3)
    assert quick("state", "diff", "report-one", "2", "3").stdout == (
        '- topics: ["a"]\n+ topics: "none"\n'
    )
    assert quick("state", "restore", "report-one", "2").returncode == 2
    restored = data(quick("state", "restore", "report-one", "2", "--yes", "--json"))
    assert restored["versions"] == {"n": 1, "topics": 3}
    told = quick("state", "export", "report-one", tmp_path / "out.json", "--at", "3")
    assert told.stdout == f"Wrote 2 keys to {tmp_path / 'out.json'}.\n"
    assert json.loads((tmp_path / "out.json").read_text()) == {"n": 3, "topics": "none"}


def test_conflicts_and_bad_input_are_told(filled: dict[str, Any], quick: Run) -> None:
    refused = quick("state", "set", "report-one", "n", "9", "--if-version", "4")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert refused.stderr == (
        "Error: 'n' is at version 1, and was expected at version 4; nothing was changed\n"
    )
    [conflict] = data(quick("state", "conflicts", "report-one", "--json"))["conflicts"]
    assert (conflict["key"], conflict["expected"], conflict["current"]) == ("n", 4, 1)
    for arguments, code in {
        ("get", "report-one", "missing"): 3,
        ("get", "report-one", "n", "--at", "9"): 2,
        ("get", "report-one", "n", "--prefix", "n"): 2,
        ("set", "report-one", "n", "nope"): 2,
        ("set", "report-one", "", "1"): 2,
        ("append", "report-one", "topics", "1"): 2,
        ("increment", "report-one", "topics"): 4,
        ("get", "nobody-at-all"): 3,
    }.items():
        result = quick("state", *arguments)
        assert (result.returncode, result.stdout) == (code, ""), arguments
        assert result.stderr.startswith("Error: ")


def test_the_feed_is_exported_as_lines(filled: dict[str, Any], quick: Run, tmp_path: Path) -> None:
    told = quick("feed", "export", tmp_path / "feed.jsonl", "report-one")
    assert told.stdout == f"Wrote 3 events to {tmp_path / 'feed.jsonl'}.\n"
    one = quick("feed", "export", tmp_path / "one.jsonl", "report-one", "--since", "2")
    assert one.stdout == f"Wrote 1 event to {tmp_path / 'one.jsonl'}.\n"
    found = [json.loads(line) for line in (tmp_path / "feed.jsonl").read_text().splitlines()]
    assert [event["position"] for event in found] == [1, 2, 3]
    options = ("--since", "2", "--kind", "state_changed")
    for more in ((), ("--json",)):
        [line] = quick("feed", "export", "-", "report-one", *options, *more).stdout.splitlines()
        assert json.loads(line) == found[2]
    everything = [
        json.loads(each) for each in quick("feed", "export", "-", "--all").stdout.splitlines()
    ]
    # A cursor tells when it was given, not only what came before it.
    cursors = [each.pop("cursor") for each in everything]
    assert [each for each in everything if each["root_id"] == "report-one"] == found
    said = quick("feed", "export", "-", "--all", "--since", cursors[0]).stdout.splitlines()
    rest = [json.loads(each) for each in said]
    assert [{**each, "cursor": None} for each in rest] == [
        {**each, "cursor": None} for each in everything[1:]
    ]
    for wrong in (("-",), ("-", "report-one", "--all"), ("-", "--all", "--since", "x")):
        assert quick("feed", "export", *wrong).returncode == 2
    assert quick("feed", "export", "-", "report-one", "--since", "x").returncode == 2
    assert quick("feed", "export", "-", "--all", "--own").returncode == 2


@pytest.mark.parametrize("command", [("follow",), ("export", "-")])
def test_a_kind_that_does_not_exist_is_refused_with_those_that_do(
    command: tuple[str, ...], filled: dict[str, Any], quick: Run
) -> None:
    options = ("--kind", "state_changed", "--kind", "state_change")
    told = quick("feed", *command, "report-one", *options)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("Error: --kind must be one of session_created, ")
    assert told.stderr.endswith(", peers_pruned, not 'state_change'\n")


@pytest.mark.parametrize("command", [("feed", "follow"), ("state", "watch")])
def test_what_comes_is_printed_until_ctrl_c(
    command: tuple[str, str], filled: dict[str, Any]
) -> None:
    options = [f"--{name}={text}" for name, text in filled.items()]
    arguments = [sys.executable, "-m", "holdfast", *command, "report-one", *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while json.loads(process.stdout.readline()).get("operation", "increment") != "increment":
            pass
        with holdfast.open(**filled) as store:
            store.find_session("report-one").state.set("late", 1)
        while "late" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


def test_negative_numbers_and_line_separators(filled: dict[str, Any], quick: Run) -> None:
    assert quick("state", "increment", "report-one", "n", "-5").stdout == "n is -2, version 2.\n"
    assert quick("state", "set", "report-one", "k", "-1").returncode == 0
    quick("state", "set", "report-one", "lines", '"a\\u2028b\\u0085c"')
    assert quick("state", "get", "report-one", "lines").stdout == '"a\ufffdb\ufffdc"\n'
