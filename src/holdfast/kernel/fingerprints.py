"""Which cipher keys a store is written with, known by fingerprints that tell nothing of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StoreError
from .nouns import Noun
from .operation import Op, one, operation, query

NAME = "cipher_keys"
READ = "SELECT value FROM hf_meta WHERE name = :name"
WRITE = """
INSERT INTO hf_meta (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
WHERE hf_meta.value = CAST(:before AS TEXT)
RETURNING value
"""


class CipherKeys:
    """The keys of the process that opens a store, the current one last; none without a cipher."""

    def __init__(self, fingerprints: Sequence[str], nouns: Sequence[Noun]) -> None:
        self._ours = list(fingerprints)
        self._nouns = nouns

    @query
    def are_noted(self) -> Op[bool]:
        """Whether the store knows our current key already. Raises StoreError if we lack its own."""
        return (yield from self._change()) is None

    @operation
    def note(self) -> Op[None]:
        """Write our current key down as the store's, unless another process noted its own."""
        while (change := (yield from self._change())) is not None:
            before, value = change
            if (yield from one(WRITE, name=NAME, before=before, value=value)) is not None:
                return

    def _change(self) -> Op[tuple[str, str] | None]:
        """Return what the store knows and what it is to know from now on, or None if it does."""
        row = yield from one(READ, name=NAME)
        noted = [] if row is None else str(row["value"]).split()
        if noted and noted[-1] not in self._ours:
            raise StoreError(
                "this store is encrypted, and its current key is not among those it was opened "
                "with (none, others, or another key of the same id); open it with its cipher"
            )
        if not self._ours or self._ours[-1] in noted:
            return None
        if not noted and not (yield from self._is_empty()):
            raise StoreError(
                "this store is not encrypted and was opened with a cipher; export its sessions and "
                "import them into a new store that has the cipher"
            )
        return " ".join(noted), " ".join([*noted, self._ours[-1]])

    def _is_empty(self) -> Op[bool]:
        for noun in self._nouns:
            if noun.any_record and (yield from one(noun.any_record)) is not None:
                return False
        return True
