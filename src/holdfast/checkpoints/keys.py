"""The keys of checkpoints and items: two numbers in one of 63 bits, so that a row has one key.

A checkpoint is session number * 2^28 + version, items are line * 2^20 + index. So there are keys
for 34 billion sessions, 54 new ones in every second of 20 years, each with 268 million versions,
one in every second of 8 years; and for 8.8 trillion lines, 13,900 in every second of 20 years. A
list that has filled a line goes on in another.
"""

from __future__ import annotations

VERSIONS = 2**28
ITEMS = 2**20
