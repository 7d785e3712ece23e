"""What the shell offers to complete: ids in the store that the line names, and closed sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from .. import store
from ..errors import HoldfastError

OFFERED_MAX = 1_000

Offers = Iterable[tuple[str, str]]


def session_ids(ctx: typer.Context) -> Offers:
    """Return the ids of sessions."""

    def read(opened: store.Store) -> Offers:
        return [(each.id, each.name or each.status) for each in opened.sessions(limit=OFFERED_MAX)]

    return _looked_up(ctx, read)


def effect_ids(ctx: typer.Context, incomplete: str) -> Offers:
    """Return the numbers of effects, or their ids if an id is begun."""

    def read(opened: store.Store) -> Offers:
        for each in opened.effects(limit=OFFERED_MAX):
            about = f"{each.tool}, {each.status}"
            yield from ((str(each.number), about), (each.id, about))

    found = list(_looked_up(ctx, read))
    return found if incomplete else found[::2]


def item_ids(ctx: typer.Context, incomplete: str) -> Offers:
    """Return the numbers of work items, or their ids if an id is begun."""

    def read(opened: store.Store) -> Offers:
        for each in opened.work.list(limit=OFFERED_MAX):
            about = f"{each.type}, {each.status}"
            yield from ((str(each.number), about), (each.id, about))

    found = list(_looked_up(ctx, read))
    return found if incomplete else found[::2]


def one_of(values: Iterable[str]) -> Callable[[], list[str]]:
    """Return a completion that offers a closed set."""
    return lambda: list(values)


def _looked_up(ctx: typer.Context, read: Callable[[store.Store], Offers]) -> Offers:
    """Read what a store offers; nothing where there is none, because nobody asked for an error."""
    url, namespace = ctx.params.get("url"), ctx.params.get("namespace")
    try:
        with store.open(url, namespace=namespace, mode="read") as opened:
            return list(read(opened))
    except HoldfastError:
        return []
