"""Reading the tables themselves: what is there, and what may not be missing or left over."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import holdfast
from holdfast.checkpoints.keys import ITEMS, VERSIONS
from holdfast.checkpoints.lines import RUN_ITEMS, Inline, Ref, manifest_of
from holdfast.kernel.operation import rows
from tests.client.served import embedded

Tables = dict[str, list[dict[str, Any]]]

ORDER = {
    "hf_sessions": "number",
    "hf_epochs": "session_number, epoch",
    "hf_checkpoints": "key",
    "hf_lines": "id",
    "hf_items": "key",
    "hf_uses": "line_id, session_number",
    "hf_pins": "key",
    "hf_attestations": "number",
    "hf_trees": "root_id",
    "hf_events": "root_id, position",
    "hf_doors": "name",
}


def dump(store: Any) -> Any:
    """Return every table that sessions and checkpoints write to; an awaitable if the store is."""
    return embedded(store).run(_read)


def _read(tx: holdfast.Transaction) -> holdfast.Op[Tables]:
    found: Tables = {}
    for table, order in ORDER.items():
        read = yield from rows(f"SELECT * FROM {table} ORDER BY {order}")
        found[table] = [dict(row) for row in read]
    return found


def wipe(store: holdfast.Store) -> None:
    """Empty the tables, through the door that the triggers look for."""

    def remove(tx: holdfast.Transaction) -> holdfast.Op[None]:
        yield from rows("INSERT INTO hf_doors (name) VALUES ('wipe')")
        for table in ORDER:
            if table not in {"hf_sessions", "hf_doors"}:
                yield from rows(f"DELETE FROM {table}")
        yield from rows("UPDATE hf_sessions SET parent_id = NULL")
        yield from rows("DELETE FROM hf_sessions")
        yield from rows("DELETE FROM hf_doors")

    store.run(remove)


def check(store: holdfast.Store, run_items: int = RUN_ITEMS) -> Tables:
    """Make sure that nothing is orphaned and nothing referenced is lost; return the tables.

    A session uses exactly the lines that its checkpoints need, those in lists' pieces included.
    """
    tables: Tables = dump(store)
    sessions = {row["number"]: row for row in tables["hf_sessions"]}
    lines = {row["id"]: row for row in tables["hf_lines"]}
    used: dict[int, set[int]] = defaultdict(set)
    for row in tables["hf_uses"]:
        assert row["line_id"] in lines, f"a use names the lost line {row['line_id']}"
        assert row["session_number"] in sessions, "a use outlived its session"
        used[row["session_number"]].add(row["line_id"])
    orphans = set(lines) - set().union(*used.values())
    assert not orphans, f"lines without a use: {orphans}"
    lengths = own_lengths(tables["hf_items"], lines, run_items)
    needed, ends = _needed(store, tables, lines, lengths)
    assert dict(needed) == dict(used), "uses are not what the checkpoints need"
    assert lengths == ends, "items lie beyond the longest reference to their line"
    for table in ("hf_pins", "hf_attestations", "hf_checkpoints"):
        for row in tables[table]:
            assert row["key"] // VERSIONS in sessions, f"{table} outlived its session"
    for row in tables["hf_epochs"]:
        assert row["session_number"] in sessions, "an epoch outlived its session"
    assert tables["hf_doors"] == []
    _check_feed(tables)
    return tables


def own_lengths(
    items: list[dict[str, Any]], lines: dict[int, Any], run_items: int
) -> dict[int, int]:
    """Return how many own items each line has; they must be dense, single or in aligned runs."""
    lengths = dict.fromkeys(lines, 0)
    for row in items:
        line_id, index = divmod(row["key"], ITEMS)
        assert line_id in lines, f"items of the lost line {line_id}"
        assert index == lengths[line_id], f"line {line_id} has a hole before {index}"
        is_run = row["count"] == run_items and index % run_items == 0
        assert is_run or row["count"] == 1, f"line {line_id} has a run of {row['count']} at {index}"
        lengths[line_id] += row["count"]
    return lengths


def _needed(
    store: holdfast.Store, tables: Tables, lines: dict[int, Any], lengths: dict[int, int]
) -> tuple[dict[int, set[int]], dict[int, int]]:
    needed: dict[int, set[int]] = defaultdict(set)
    ends = dict.fromkeys(lines, 0)
    for row in tables["hf_checkpoints"]:
        number, version = divmod(row["key"], VERSIONS)
        for entry in manifest_of(store.runtime.codec, row).values():
            if isinstance(entry, Inline):
                continue
            assert entry.line_id in lines, f"{number}/{version} needs the lost line {entry.line_id}"
            needed[number].add(entry.line_id)
            end = entry.own_end if isinstance(entry, Ref) else 1
            ends[entry.line_id] = max(ends[entry.line_id], end)
            if isinstance(entry, Ref):
                line = lines[entry.line_id]
                assert lengths[entry.line_id] >= entry.own_end
                pieces = (
                    [] if line["pieces"] is None else store.runtime.codec.unpack(line["pieces"])
                )
                assert sum(count for _, _, count in pieces) == line["base"] == entry.base
                for named, start, count in pieces:
                    line_id = named or entry.line_id
                    assert line_id in lines, f"{number}/{version} needs the lost line {line_id}"
                    assert lengths[line_id] >= start + count
                    needed[number].add(line_id)
                    ends[line_id] = max(ends[line_id], start + count)
    return needed, ends


def _check_feed(tables: Tables) -> None:
    positions: dict[str, list[int]] = defaultdict(list)
    for row in tables["hf_events"]:
        positions[row["root_id"]].append(row["position"])
    for tree in tables["hf_trees"]:
        assert positions[tree["root_id"]] == list(range(1, tree["position"] + 1))
