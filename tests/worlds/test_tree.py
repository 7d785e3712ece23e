"""The tree of snapshots, compared with plain copies."""

from __future__ import annotations

from random import Random

import pytest

from holdfast.errors import CheckpointInvalid
from holdfast.worlds.tree import Changes, DeltaTree


def difference(before: dict[str, int], after: dict[str, int]) -> Changes:
    return {
        key: (before.get(key), after.get(key))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }


@pytest.mark.parametrize("seed", range(20))
def test_every_snapshot_is_restored_from_every_other(seed: int) -> None:
    random = Random(seed)
    tree = DeltaTree()
    live: dict[str, int] = {}
    head: dict[str, int] = {}
    kept: list[tuple[int, dict[str, int]]] = []
    for _ in range(200):
        match random.randrange(5):
            case 0 | 1:
                key = random.choice("abcd")
                live[key] = random.randrange(3)
                if random.random() < 0.3:
                    del live[key]
            case 2:
                kept.append((tree.add(difference(head, live)), dict(live)))
                head = dict(live)
            case 3 if kept:
                token, wanted = random.choice(kept)
                for key, (now, value) in tree.changes_to(
                    tree.find(token), difference(head, live)
                ).items():
                    assert live.get(key) == now
                    assert now != value
                    live.pop(key, None)
                    if value is not None:
                        live[key] = value
                assert live == wanted
                tree.move(tree.find(token))
                head = dict(live)
            case 4 if kept:
                token, _ = kept.pop(random.randrange(len(kept)))
                tree.release(token)
        # What nobody can restore is folded away; only where branches part a node may stay.
        assert len(tree) <= 2 * len({token for token, _ in kept}) + 2


def test_a_released_snapshot_is_unknown_and_an_unchanged_one_is_shared() -> None:
    tree = DeltaTree()
    first = tree.add({"a": (None, 1)})
    assert tree.add({}) == first
    tree.release(first)
    tree.find(first)
    tree.release(first)
    with pytest.raises(CheckpointInvalid):
        tree.find(first)
