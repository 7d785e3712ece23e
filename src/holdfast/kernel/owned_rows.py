"""The rows of many owners (trees, sessions, lines), read by few statements in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain, islice
from operator import itemgetter
from typing import Literal

from ..dataclass import dataclass
from .operation import Op, Row, rows
from .sql import given, given_keys, merged

OWNERS_PER_PAGE = 256
ROWS_PER_PAGE = 500


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Which rows of a table belong to an owner, and in which order they are read.

    `where` is the condition for the rows of an `{owner}`; an index must cover it and the columns of
    `after`, which give the order. Their values are lower than those of all rows.
    """

    columns: str
    source: str
    where: str
    after: Mapping[str, int | str]
    owner: Literal["INTEGER", "TEXT"] = "INTEGER"
    parts: Sequence[str] = ("true",)
    """Conditions of which each row meets one, and which come before `after` in the index."""
    of_many: str = field(init=False)
    """Returns rows of all given owners, unordered."""
    of_one: str = field(init=False)
    """Returns a page of one owner's rows, after the last of the previous page."""

    def __post_init__(self) -> None:
        owners = given_keys("owners", self.owner)
        of_many = (
            f"SELECT given_key AS owner, {self.columns} FROM {owners} AS given"  # noqa: S608 - own texts
            f" CROSS JOIN {self.source}"
            f" WHERE {self.where.format(owner='given_key')} LIMIT :limit"
        )
        order, after = ", ".join(self.after), ", ".join(f":{name}" for name in self.names)
        of_one = (
            f"SELECT {self.columns} FROM {self.source}"  # noqa: S608
            f" WHERE {self.where.format(owner=f'CAST(:owner AS {self.owner})')}"
            f" AND ({order}) > ({after})"
        )
        of_one = merged([f"{of_one} AND {part}" for part in self.parts], order)
        object.__setattr__(self, "of_many", of_many)
        object.__setattr__(self, "of_one", of_one)

    @property
    def names(self) -> list[str]:
        """The columns that rows are ordered by, without their tables."""
        return [column.rpartition(".")[2] for column in self.after]


def read_each(
    owned: OwnedRows, owners: Iterable[int | str], take: Callable[[Row], object]
) -> Op[None]:
    """Pass the rows of each owner to `take`, in order.

    One statement reads the rows of as many owners as fit in a page; those of an owner with more
    than a page are read page by page.
    """
    waiting, size = iter(owners), OWNERS_PER_PAGE
    while some := list(islice(waiting, size)):
        if size == 1:
            yield from _read_pages(owned, some[0], take)
            size = 2
            continue
        found = yield from rows(owned.of_many, owners=given(some), limit=ROWS_PER_PAGE + 1)
        if len(found) > ROWS_PER_PAGE:
            waiting, size = chain(some, waiting), max(1, len(some) // 4)
            continue
        if len(found) < ROWS_PER_PAGE // 4:
            size = min(OWNERS_PER_PAGE, size * 2)
        places = {owner: place for place, owner in enumerate(some)}
        # Two stable sorts with small keys are faster than one with tuples.
        found.sort(key=itemgetter(*owned.names))
        found.sort(key=lambda row: places[row["owner"]])
        for row in found:
            take(row)


def _read_pages(owned: OwnedRows, owner: int | str, take: Callable[[Row], object]) -> Op[None]:
    names = owned.names
    behind = dict(zip(names, owned.after.values(), strict=True))
    while True:
        page = yield from rows(owned.of_one, owner=owner, **behind, limit=ROWS_PER_PAGE)
        for row in page:
            take(row)
        if len(page) < ROWS_PER_PAGE:
            return
        behind = {name: page[-1][name] for name in names}
