"""The keys of checkpoints and items: two numbers packed into one of 63 bits.

A checkpoint is session number * 2^28 + version, an item is line * 2^20 + index. That is enough for
34 billion sessions (54 new ones per second for 20 years) of 268 million versions (one per second
for 8 years), and for 8.8 trillion lines (13,900 per second for 20 years). A list that has filled a
line continues in another.
"""

from __future__ import annotations

VERSIONS = 2**28
ITEMS = 2**20


def in_range(keys: int) -> str:
    """Return the condition of rows whose key belongs to a session, or to a line: the `{owner}`."""
    return f"key >= {{owner}} * {keys} AND key < ({{owner}} + 1) * {keys}"
