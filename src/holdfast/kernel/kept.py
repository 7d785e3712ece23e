"""Mappings that grow with what is exported or imported, while their memory does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import field
from functools import partial
from typing import Any, TypeVar, overload

import apsw
import msgspec

from ..errors import StoreUnavailable

K = TypeVar("K", bound=int | str | tuple[Any, ...])
V = TypeVar("V")
T = TypeVar("T")

# So many entries of each mapping are in memory, and so many keys are read at once.
ENTRIES_IN_MEMORY = 1_000

SETTINGS = ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", "PRAGMA cache_size = -250")
CREATE_ENTRIES = "CREATE TABLE entries (key PRIMARY KEY, value BLOB) WITHOUT ROWID"
PUT_ENTRY = "INSERT OR REPLACE INTO entries (key, value) VALUES (?, ?)"
ADD_ENTRY = "INSERT INTO entries (key, value) VALUES (?, ?)"
READ_VALUE = "SELECT value FROM entries WHERE key = ?"
LIST_KEYS = "SELECT key FROM entries WHERE key > ? ORDER BY key LIMIT ?"
COUNT_ENTRIES = "SELECT count(*) FROM entries"
REMOVE_ENTRY = "DELETE FROM entries WHERE key = ?"
# In SQLite's order all other numbers, and all texts and bytes, come after it.
LEAST_KEY = -(2**63)
NOTHING = msgspec.msgpack.encode(None)


class Kept(MutableMapping[K, V]):
    """A mapping with its recent entries in memory and the others in a temporary file.

    The file has no name, and is there only if there are more entries than may be in memory. Numbers
    and texts are listed in their order. A value that was changed must be set again. Contents of the
    store must be sealed or hashed before they are put here.
    """

    __slots__ = ("_at_most", "_decoder", "_file", "_kind", "_recent", "_unchanged")

    def __init__(self, kind: type[V] | None, at_most: int = 0) -> None:
        self._kind = kind
        self._at_most = at_most or ENTRIES_IN_MEMORY
        self._recent: dict[K, V] = {}
        self._unchanged: set[K] = set()
        self._decoder: msgspec.msgpack.Decoder[V]
        self._file: apsw.Connection | None = None

    def __contains__(self, key: object) -> bool:
        if key in self._recent:
            return True
        if self._file is None:
            return False
        found = self._run(READ_VALUE, _stored(key))
        if found:
            self[key] = self._decoder.decode(found[0][0])  # type: ignore[index]
            self._unchanged.add(key)  # type: ignore[arg-type]
        return bool(found)

    def __getitem__(self, key: K) -> V:
        if key in self._recent or key in self:
            return self._recent[key]
        raise KeyError(key)

    @overload
    def get(self, key: K, default: None = None, /) -> V | None: ...

    @overload
    def get(self, key: K, default: V | T, /) -> V | T: ...

    def get(self, key: K, default: object = None, /) -> object:
        """Return the value of a key, or the default."""
        found = self._recent.get(key, self)
        if found is not self:
            return found
        return self._recent[key] if self._file is not None and key in self else default

    def __setitem__(self, key: K, value: V) -> None:
        if len(self._recent) >= self._at_most and key not in self._recent:
            self._write()
        self._recent[key] = value
        self._unchanged.discard(key)

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        del self._recent[key]
        self._unchanged.discard(key)
        if self._file is not None:
            self._run(REMOVE_ENTRY, _stored(key))

    def __iter__(self) -> Iterator[K]:
        if self._file is None:
            yield from sorted(self._recent)
            return
        self._write()
        behind: Any = LEAST_KEY
        while page := self._run(LIST_KEYS, behind, self._at_most):
            for (behind,) in page:
                key: Any = behind
                if type(behind) is bytes:
                    key = msgspec.msgpack.decode(behind, type=tuple)
                yield key

    def __len__(self) -> int:
        if self._file is None:
            return len(self._recent)
        self._write()
        return int(self._run(COUNT_ENTRIES)[0][0])

    def clear(self) -> None:
        """Remove all entries, and the file."""
        self._recent.clear()
        self._unchanged.clear()
        self._file = None

    def _write(self) -> None:
        """Move all entries from memory to the file."""
        encode = msgspec.msgpack.encode
        try:
            changed = self._recent.keys() - self._unchanged
            rows = ((_stored(key), encode(self._recent[key])) for key in changed)
            self._opened().executemany(PUT_ENTRY, rows)
        except apsw.Error as error:
            raise _unusable(error) from error
        self._recent.clear()
        self._unchanged.clear()

    def _opened(self) -> apsw.Connection:
        if self._file is None:
            self._decoder = msgspec.msgpack.Decoder(self._kind)
            # An empty name stands for a temporary file that SQLite removes.
            self._file = apsw.Connection("")
            for statement in (*SETTINGS, CREATE_ENTRIES, "BEGIN"):
                self._file.execute(statement).fetchall()
        return self._file

    def _run(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        assert self._file is not None
        try:
            return self._file.execute(sql, parameters).fetchall()
        except apsw.Error as error:
            raise _unusable(error) from error


class KeptSet(Kept[K, None]):
    """A set that is kept in the same way."""

    __slots__ = ()

    def __init__(self, keys: Iterable[K] = ()) -> None:
        super().__init__(None)
        for key in keys:
            self.add(key)

    def add(self, key: K) -> bool:
        """Add a key; return whether it was not there."""
        is_new = key not in self
        if is_new:
            self[key] = None
        return is_new

    def add_all(self, keys: Iterable[K]) -> K | None:
        """Add keys at once, up to the first that was there already; return that, or None."""
        self._write()
        last: K | None = None

        def each() -> Iterator[tuple[Any, bytes]]:
            nonlocal last
            for last in keys:
                yield _stored(last), NOTHING

        try:
            self._opened().executemany(ADD_ENTRY, each())
        except apsw.ConstraintError:
            return last
        except apsw.Error as error:
            raise _unusable(error) from error
        return None


def kept(kind: Any, at_most: int = 0) -> Any:
    """Return a field of a dataclass for a mapping to values of this type."""
    return field(default_factory=partial(Kept, kind, at_most))


def kept_set() -> Any:
    """Return a field of a dataclass for a set."""
    return field(default_factory=KeptSet)


def _stored(key: Any) -> Any:
    return msgspec.msgpack.encode(key) if type(key) is tuple else key


def _unusable(error: apsw.Error) -> StoreUnavailable:
    return StoreUnavailable(f"the temporary directory cannot be used: {error}")
