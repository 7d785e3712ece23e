"""Frames of a write-ahead log: the same pages again in a shorter log, with checksums that fit.

Every commit of a page adds a frame, and only the last one of each page counts. The checksum of a
frame runs over all frames before it, so a log that leaves some out needs new ones.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER_BYTES: Final = 32
FRAME_HEADER_BYTES: Final = 24
# The words of the checksum are little-endian.
_MAGIC: Final = 0x377F_0682
_MASK: Final = 0xFFFF_FFFF

Checksum = tuple[int, int]


def is_readable(header: bytes) -> bool:
    """Return whether a log, by its header, has the kind of checksums that this module computes."""
    return len(header) == HEADER_BYTES and int.from_bytes(header[:4], "big") == _MAGIC


def checksum_before(header: bytes, frame: bytes) -> Checksum:
    """Return the checksum up to a frame, whose header is given, or up to the first one."""
    found: Checksum = struct.unpack_from(">II", *((frame, 16) if frame else (header, 24)))
    return found


def shortened(frames: bytes, page_bytes: int, checksum: Checksum) -> bytes:
    """Return frames with the last content of each page, as one commit after a checksum."""
    kept = latest_pages(frames, page_bytes)
    pages = _page_count(frames, page_bytes)
    last, salts = max(kept), frames[8:16]
    made = bytearray()
    for page, content in kept.items():
        head = struct.pack(">II", page, pages if page == last else 0)
        checksum = _summed(_summed(checksum, head), content)
        made += head + salts + struct.pack(">II", *checksum) + content
    return bytes(made)


def latest_pages(frames: bytes, page_bytes: int) -> dict[int, bytes]:
    """Return the last content of each page, in the order of page numbers."""
    size = FRAME_HEADER_BYTES + page_bytes
    last: dict[int, int] = {}
    for start in range(0, len(frames), size):
        last[int.from_bytes(frames[start : start + 4], "big")] = start
    # A page beyond the end belongs to a time when the database was longer.
    pages = _page_count(frames, page_bytes)
    return {
        page: frames[last[page] + FRAME_HEADER_BYTES : last[page] + size]
        for page in sorted(last)
        if page <= pages
    }


def _page_count(frames: bytes, page_bytes: int) -> int:
    """Return how many pages the database has after the last frame, which is a commit."""
    commit = len(frames) - FRAME_HEADER_BYTES - page_bytes
    return int.from_bytes(frames[commit + 4 : commit + 8], "big")


def _summed(checksum: Checksum, data: bytes) -> Checksum:
    first, second = checksum
    words = iter(struct.unpack(f"<{len(data) // 4}I", data))
    for even, odd in zip(words, words, strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second
