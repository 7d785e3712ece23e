"""A process with a store of its own: does what each line of its input asks, and answers."""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

import holdfast
from holdfast import Session, Store


@holdfast.tool
def charge(card: str) -> str:
    """Take money."""
    return f"charged {card}"


@holdfast.tool(effect="write")
def put(value: int) -> int:
    """Set something."""
    return value


def change(store: Store, ids: list[str], seed: int) -> str:
    """Change something at random; the ids are those of the sessions to choose from."""
    random = Random(seed)
    open_ids = [id for id in ids if store.find_session(id).info().status == "active"]
    if not open_ids or random.random() < 0.1:
        parent = random.choice([None, *open_ids])
        return f"begin {store.session(parent=parent, metadata={'n': seed % 7}).id}"
    session = store.find_session(random.choice(open_ids))
    name = random.choice(list(CHANGES))
    CHANGES[name](store, session, random)
    if random.random() < 0.1:
        ended = random.choice(ids)
        if store.find_session(ended).info().status in ("completed", "failed"):
            store.session(ended, reopen=True)
            name += " and reopen"
    return name


def rewind(store: Store, session: Session, random: Random) -> None:
    version = session.info().version
    if version > 1:
        session.rewind(random.randint(max(version - 3, 1), version - 1))


def fork(store: Store, session: Session, random: Random) -> None:
    version = session.info().version
    if version:
        session.fork(version, state="copy" if session.id == session.root_id else None)


CHANGES: dict[str, Any] = {
    "append": lambda store, session, random: session.append("log", [random.randrange(9)]),
    "save": lambda store, session, random: session.save(plan={"n": random.randrange(4)}),
    "record": lambda store, session, random: session.record(
        "iteration_end", {"iteration": random.randint(1, 4)}
    ),
    "charge": lambda store, session, random: session.call(charge, card=random.choice("abc")),
    "put": lambda store, session, random: session.call(put, value=random.randrange(2)),
    "once": lambda store, session, random: store.once(
        f"key {random.randrange(3)}", lambda: random.randrange(9)
    ),
    "state": lambda store, session, random: session.state.set(
        f"k{random.randrange(3)}", random.randrange(4)
    ),
    "count": lambda store, session, random: session.state.increment("total"),
    "forget": lambda store, session, random: session.state.replace({"only": random.randrange(2)}),
    "end": lambda store, session, random: session.end(random.choice(["completed", "failed"])),
    "cancel": lambda store, session, random: session.cancel(),
    "label": lambda store, session, random: store.session(
        session.id, name=random.choice("xyz"), metadata={"n": random.randrange(3)}
    ),
    "rewind": rewind,
    "fork": fork,
}


def content(store: Store, ids: list[str]) -> list[Any]:
    """Everything about these sessions that a rollback restores."""
    found: list[Any] = []
    for id in ids:
        session = store.find_session(id)
        info, latest = session.info(), session.latest()
        standing = [
            [each.number, each.tool, each.arguments, each.result]
            for each in store.effects(session=id, limit=1_000)
            if each.undone_by is None
        ]
        facts = [info.status, info.name, info.metadata, info.parent_id]
        channels = None if latest is None else latest.channels
        where = session.resume_point().iteration
        found.append([id, facts, channels, where, session.state.snapshot().document, standing])
    keys = [
        [each.number, each.result]
        for each in store.effects(limit=1_000)
        if each.undone_by is None and each.session_id is None
    ]
    return [found, keys]


def main(place: str) -> None:
    """Answer until the input ends."""
    with holdfast.open(**json.loads(place)) as store:
        print("ready", flush=True)
        for line in sys.stdin:
            what, *given = json.loads(line)
            function: Any = {"change": change, "content": content}[what]
            answer = function(store, *given)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
