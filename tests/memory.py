"""The memory of a process that many others are forked from."""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path

MAPS = Path("/proc/self/maps")
HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
FORKS_BETWEEN = 32


def keep_forks_cheap() -> None:
    """Keep this process's objects in huge pages, where Linux can: a fork copies each page's entry.

    In small pages, copying and dropping the entries of hundreds of megabytes takes longer than
    most of what forked processes do. A huge page in which something is changed after a fork is
    split, so the objects are moved again after some forks.
    """
    if not MAPS.exists():
        return
    process, forks = os.getpid(), itertools.count()

    def before() -> None:
        if os.getpid() == process and next(forks) % FORKS_BETWEEN == 0:
            _move_to_huge_pages()

    os.register_at_fork(before=before)


def _move_to_huge_pages() -> None:
    libc = ctypes.CDLL(None)
    for line in MAPS.read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        first = -(-first // HUGE_PAGE) * HUGE_PAGE
        size = end // HUGE_PAGE * HUGE_PAGE - first
        if size > 0 and access == "rw-p" and name in ([], ["[heap]"]):
            # Older kernels refuse it, and nothing is lost.
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_COLLAPSE)
