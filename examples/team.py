"""A team of five agents, each a process, that share what they find; one is killed on the way.

    python examples/team.py [DIRECTORY]

A lead session puts topics into the shared state. Five researchers claim topics by compare-and-swap,
report what they find, and count the pages they have read. One of them is killed with SIGKILL while
it works. Its claims are released, and the team finishes: every topic once, nothing lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import holdfast

TOPICS = [f"topic-{number:02}" for number in range(1, 21)]
RESEARCHERS = ["anna", "ben", "chen", "dora", "eli"]
VICTIM = "chen"


def lead(url: str) -> None:
    """Start the team, kill one member, release its claims, and report what the team found."""
    with holdfast.open(url) as store:
        session = store.session("report", name="lead", reopen=True)
        session.state.replace({f"todo:{topic}": "free" for topic in TOPICS})
        # The victim starts first: on a busy machine the others could leave it nothing to claim.
        team = {VICTIM: start(VICTIM, session)}
        victim = wait_for(lambda: claims(session.state, VICTIM), 1)
        team |= {name: start(name, session) for name in RESEARCHERS if name != VICTIM}
        wait_for(lambda: session.state.get("started", []), len(RESEARCHERS))
        team[VICTIM].send_signal(signal.SIGKILL)
        team[VICTIM].wait()
        print(f"{VICTIM} was killed while it worked on {', '.join(victim)}")
        # Only claims that the dead researcher wrote last are still its own.
        for key in claims(session.state, VICTIM):
            entry = session.state.entry(key)
            assert entry is not None
            session.state.set(key, "free", if_version=entry.version)
        for name, process in team.items():
            if name != VICTIM and process.wait() != 0:
                raise SystemExit(f"{name} ended with {process.returncode}")
        tell(session.state)


def start(name: str, parent: holdfast.Session) -> subprocess.Popen[bytes]:
    """Start a researcher, who finds the store and its parent in the environment."""
    command = [sys.executable, __file__, "--researcher", name]
    return subprocess.Popen(command, env={**os.environ, **parent.environment()})


def research(name: str) -> None:
    """Claim topics until none is left, and report on each in one transaction."""
    me = holdfast.current_session()
    assert me is not None
    with holdfast.open(me.url) as store:
        session = store.session(f"{me.id}-{name}", parent=me.id, agent=name, reopen=True)
        state = session.state
        state.add("started", name)
        while True:
            todo = {key: value for key, value in state.snapshot().document.items() if ":" in key}
            open_keys = [key for key, value in todo.items() if value != "done"]
            if not open_keys:
                return
            for key in open_keys:
                if todo[key] == "free" and claim(state, key, name):
                    time.sleep(0.05 if name != VICTIM else 3600)  # The work itself.
                    state.batch(
                        [
                            {"op": "set", "key": key, "value": "done"},
                            {"op": "append", "key": "findings", "items": [f"{name}: {key[5:]}"]},
                            {"op": "increment", "key": "pages_read", "delta": 3},
                        ]
                    )
            time.sleep(0.02)


def claim(state: holdfast.State, key: str, name: str) -> bool:
    """Claim a free topic; False if another researcher was faster."""
    entry = state.entry(key)
    if entry is None or entry.value != "free":
        return False
    try:
        state.set(key, name, if_version=entry.version)
    except holdfast.VersionConflict:
        return False
    return True


def claims(state: holdfast.State, name: str) -> list[str]:
    """Return the topics that a researcher has claimed but not finished."""
    document = state.snapshot().document
    return [key for key, value in document.items() if key.startswith("todo:") and value == name]


def wait_for(look: Callable[[], list[str]], count: int) -> list[str]:
    """Wait until there are at least this many."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = look()
        if len(found) >= count:
            return found
        time.sleep(0.01)
    raise SystemExit("the team did not start within a minute")


def tell(state: holdfast.State) -> None:
    """Print what the team did, and check that each topic was done once."""
    document = state.snapshot().document
    findings = document["findings"]
    done = sorted(finding.partition(": ")[2] for finding in findings)
    assert done == TOPICS, done
    assert document["pages_read"] == 3 * len(TOPICS)
    for name in RESEARCHERS:
        count = sum(finding.startswith(f"{name}: ") for finding in findings)
        print(f"{name}: {count} topics")
    print(f"{len(done)} topics, each once, in {state.version()} mutations; ", end="")
    print(f"{len(state.conflicts(limit=1000))} claims came too late and were refused")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--researcher"]:
        research(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as directory:
            place = Path(sys.argv[1] if len(sys.argv) > 1 else directory).resolve()
            lead(f"sqlite:///{place}/team.db")
