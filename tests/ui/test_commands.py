"""What pages tell people to paste into a shell: it works for every name that a thing may have."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app as app_module
from holdfast.server.options import Options
from holdfast.server.ui.templates import command_line
from tests.server.serving import Served, serving
from tests.ui.content import CHILD, EXPLORED, ROOT, fill, fill_exploration

HTML = {"accept": "text/html"}
NAMES = (
    "-rf", "--help", "-", "a b", "a/b", "a%2Fb", "a#b?c=d&e", "//host", "{a,b}", "[1-3]", "*", "~",
    "it's; touch made; '", "$(touch made)", "`touch made`", "!!", "a\\b", "@file", "<b>",
)  # fmt: skip


def words_of(command: str, folder: Path) -> list[str]:
    """Return the words that a shell makes of a command, which runs nothing of it."""
    lines = f'curl() {{ holdfast "$@"; }}\nholdfast() {{ printf "%s\\0" "$@"; }}\n{command}\n'
    told = subprocess.run(
        ["bash", "-c", lines],
        cwd=folder,
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    assert list(folder.iterdir()) == []
    return told.stdout.decode().split("\0")[:-1]


def told_by(served: Served, path: str) -> dict[str, str]:
    """Return the commands of a page."""
    page = served.get(path, headers=HTML)
    assert page.status_code == 200, path
    found = re.findall(r'<code id="((?:twin|cli|curl)-[^"]*)">(.*?)</code>', page.text, re.S)
    return {id: html.unescape(code) for id, code in found}


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_page_work_for_every_name(tmp_path: Path, name: str) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    folder = tmp_path / "empty"
    folder.mkdir()
    with holdfast.open(**place) as store:
        session = store.session(name)
        session.save({"n": 1})
        session.save({"n": 2})
        session.state.set(name, 1)
        store.work.submit("mail", id=name)
    id = quote(name, safe="")
    here = f"/ui/sessions/{id}"
    parts = ("", "/transcript", "/checkpoints", "/checkpoints/1", "/diff?a=1&b=2", "/effects",
             "/spend", "/state", f"/state/{id}", "/timeline", "/moments?a=1&b=2")  # fmt: skip
    paths = [f"{here}{part}" for part in parts]
    with serving(**place) as served:
        for path in (*paths, f"/ui/events?session={id}", "/ui/events", f"/ui/work/{id}"):
            told = told_by(served, path)
            address = urlsplit(words_of(told["twin-curl"], folder)[-1])
            assert address.netloc == "localhost", path
            asked = f"{address.path}?{address.query}"
            assert served.get(asked).status_code == 200, path
            ran = CliRunner().invoke(
                app_module.app,
                words_of(told["twin-cli"], folder),
                env={"HOLDFAST_URL": place["url"]},
            )
            assert ran.exit_code == 0, (path, ran.output)
            assert "Usage:" not in ran.output, path
        forked = words_of(told_by(served, f"{here}/checkpoints/1")["cli-fork"], folder)
        set_by = words_of(told_by(served, f"{here}/state/{id}")["cli-set"], folder)
    ran = CliRunner().invoke(app_module.app, forked, env={"HOLDFAST_URL": place["url"]})
    assert ran.exit_code == 0, ran.output
    set_by[set_by.index("VALUE")] = "2"
    ran = CliRunner().invoke(app_module.app, set_by, env={"HOLDFAST_URL": place["url"]})
    assert ran.exit_code == 0, ran.output
    with holdfast.open(**place) as store:
        assert store.session(name).state.get(name) == 2
        assert len(store.sessions()) == 2


@pytest.mark.parametrize("name", ["a\u202eb", "it's\u200b\\n", "\U000e0041", "-\u2060"])
def test_a_command_has_what_is_not_seen_by_its_number(tmp_path: Path, name: str) -> None:
    told = command_line("state", "get", "root", name, if_version=1, quiet=True, left_out=None)
    assert told.isascii()
    wanted = ["--if-version", "1", "--quiet", *(["--"] if name[0] == "-" else []), "root", name]
    assert words_of(f"holdfast {told}", tmp_path) == ["state", "get", *wanted]


def test_an_exploration_is_asked_for_below_a_base_path(tmp_path: Path) -> None:
    place: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/store.db"}
    with holdfast.open(**place) as store:
        fill_exploration(store)
    with serving(Options(base_path="/tools/holdfast"), **place) as served:
        told = told_by(served, f"/tools/holdfast/ui/explorations/{EXPLORED}")["twin-curl"]
        assert f"http://localhost/tools/holdfast/ui/explorations/{EXPLORED}?" in told


def test_commands_of_pages_keep_their_filters(place: dict[str, Any], tmp_path: Path) -> None:
    with holdfast.open(**place) as store:
        fill(store)
    folder = tmp_path / "empty"
    folder.mkdir()

    def asked(served: Served, path: str) -> tuple[dict[str, Any], str]:
        """Return what a page shows as JSON, and what its command prints."""
        line = told_by(served, path)["twin-cli"]
        words = [*words_of(line, folder), *(["--json"] if " export " not in line else [])]
        words += ["--namespace", place["namespace"]] if "namespace" in place else []
        env = {"HOLDFAST_URL": place["url"]}
        ran = CliRunner().invoke(app_module.app, words, env=env)
        assert ran.exit_code == 0, (path, ran.output)
        page = (
            served.get(path, params={"format": "json"})
            if "?" not in path
            else served.get(f"{path}&format=json")
        )
        told: dict[str, Any] = page.json()
        return told, ran.stdout

    with serving(**place) as served:
        for query in ("", "?prefix=plan", "?at=1", "?at=2&prefix=plan", "?prefix=none"):
            page, printed = asked(served, f"/ui/sessions/{ROOT}/state{query}")
            keys = {key: each["value"] for key, each in page["keys"].items()}
            assert json.loads(printed)["document"] == keys, query
            curl = words_of(
                told_by(served, f"/ui/sessions/{ROOT}/state{query}")["twin-curl"], folder
            )
            answer = served.get(curl[-1].removeprefix("http://localhost")).json()
            found = answer.get("keys", answer.get("state"))
            names = [each["key"] for each in found] if isinstance(found, list) else list(found)
            assert sorted(names) == sorted(keys), query
        for query in ("", f"?session={CHILD}", "?kind=state", f"?session={CHILD}&kind=session_c",
                      f"?session={ROOT}&kind=effect_issued"):  # fmt: skip
            page, printed = asked(served, f"/ui/events{query}{'&' if query else '?'}limit=200")
            shown = {(each["root_session_id"], each["position"]) for each in page["events"]}
            lines = [json.loads(line) for line in printed.splitlines()]
            assert {(each["root_id"], each["position"]) for each in lines} == shown, query
            assert shown, query
        assert "twin-cli" not in told_by(served, "/ui/events?kind=odd")
        for query in ("", "?state=any", "?reason=approval", "?state=any&agent=planner",
                      "?state=closed"):  # fmt: skip
            page, printed = asked(served, f"/ui/pauses{query}")
            ids = [each["id"] for each in page["pauses"]]
            assert [each["id"] for each in json.loads(printed)["pauses"]] == ids, query
