"""The difference between the channels of two versions, as records and as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeAlias

from ..arguments import ValuePath, shown_path
from ..dataclass import dataclass
from ..wire import travels

CHARACTERS_SHOWN = 120
ITEMS_SHOWN = 50

ChangeKind: TypeAlias = Literal["added", "removed", "changed"]
KeyPath: TypeAlias = tuple[str | int, ...]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDiff:
    """One list item and its index: in the old list if removed, else in the new one."""

    index: int
    value: Any


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ListDiff:
    """Two lists: the first `prefix` and last `suffix` items are equal, the rest is listed."""

    prefix: int
    suffix: int
    removed: tuple[ItemDiff, ...]
    added: tuple[ItemDiff, ...]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """One change inside a value; `before` is unused if it was added, `after` if removed."""

    path: KeyPath
    change: ChangeKind
    before: Any
    after: Any


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDiff:
    """One channel that differs: `items` where both values are lists, else `values`."""

    channel: str
    change: ChangeKind
    items: ListDiff | None
    values: tuple[ValueDiff, ...]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """The channels that differ, by name; equal ones are left out."""

    channels: tuple[ChannelDiff, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON data, without unused sides."""
        return {"channels": [_plain(channel) for channel in self.channels]}

    def lines(self, *, items_max: int = ITEMS_SHOWN) -> list[str]:
        """Return it as readable text: `-` removed, `+` added, `~` changed."""
        return [line for channel in self.channels for line in _lines(channel, items_max)]


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], shared: Mapping[str, int] | None = None
) -> Diff:
    """Compare channels. 1, 1.0 and true differ; the order of keys does not matter.

    `shared` counts equal items at the beginning of lists that were not loaded.
    """
    names = sorted(before.keys() | after.keys())
    found = (_channel(name, before, after, (shared or {}).get(name, 0)) for name in names)
    return Diff(channels=tuple(channel for channel in found if channel is not None))


def _channel(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], shared: int
) -> ChannelDiff | None:
    change: ChangeKind = "changed"
    if name not in before or name not in after:
        change = "added" if name in after else "removed"
    old, new = before.get(name, []), after.get(name, [])
    if type(old) is list and type(new) is list and (old or new or change == "changed"):
        if change == "changed" and same(old, new):
            return None
        prefix, suffix = _ends(old, new)
        items = ListDiff(
            prefix=shared + prefix,
            suffix=suffix,
            removed=_items(old, prefix, suffix, shared),
            added=_items(new, prefix, suffix, shared),
        )
        return ChannelDiff(channel=name, change=change, items=items, values=())
    if change == "changed":
        values = tuple(_changes((), old, new))
    else:
        value = ValueDiff(path=(), change=change, before=before.get(name), after=after.get(name))
        values = (value,)
    if not values:
        return None
    return ChannelDiff(channel=name, change=change, items=None, values=values)


def _items(values: Sequence[Any], prefix: int, suffix: int, shared: int) -> tuple[ItemDiff, ...]:
    return tuple(
        ItemDiff(index=shared + index, value=values[index])
        for index in range(prefix, len(values) - suffix)
    )


def _ends(old: Sequence[Any], new: Sequence[Any]) -> tuple[int, int]:
    """Return the lengths of the common prefix and of the common suffix of two lists."""
    longest = min(len(old), len(new))
    prefix = 0
    while prefix < longest and same(old[prefix], new[prefix]):
        prefix += 1
    suffix = 0
    while suffix < longest - prefix and same(old[-1 - suffix], new[-1 - suffix]):
        suffix += 1
    return prefix, suffix


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal plain data of the same types."""
    if type(left) is not type(right):
        return False
    if type(left) is dict:
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if type(left) is list:
        return len(left) == len(right) and all(map(same, left, right))
    if type(left) is float:
        return repr(left) == repr(right)  # 0.0 and -0.0 differ.
    return bool(left == right)


def _changes(path: KeyPath, before: Any, after: Any) -> Iterator[ValueDiff]:
    if type(before) is dict and type(after) is dict:
        for key in sorted(before.keys() | after.keys()):
            yield from _member((*path, key), before, after, key)
    elif type(before) is list and type(after) is list:
        prefix, suffix = _ends(before, after)
        old = dict(enumerate(before[: len(before) - suffix]))
        new = dict(enumerate(after[: len(after) - suffix]))
        for index in range(prefix, max(len(old), len(new))):
            yield from _member((*path, index), old, new, index)
    elif not same(before, after):
        yield ValueDiff(path=path, change="changed", before=before, after=after)


def _member(
    path: KeyPath, before: Mapping[Any, Any], after: Mapping[Any, Any], key: str | int
) -> Iterator[ValueDiff]:
    if key in before and key in after:
        yield from _changes(path, before[key], after[key])
    elif key in after:
        yield ValueDiff(path=path, change="added", before=None, after=after[key])
    else:
        yield ValueDiff(path=path, change="removed", before=before[key], after=None)


def _plain(channel: ChannelDiff) -> dict[str, Any]:
    record: dict[str, Any] = {"channel": channel.channel, "change": channel.change}
    if channel.items is not None:
        items = asdict(channel.items)
        return {**record, "items": {name: _listed(value) for name, value in items.items()}}
    unused = {"added": "before", "removed": "after", "changed": ""}
    values = [
        {
            name: _listed(value)
            for name, value in asdict(found).items()
            if name != unused[found.change]
        }
        for found in channel.values
    ]
    return {**record, "values": values}


def _listed(value: Any) -> Any:
    return list(value) if type(value) is tuple else value


def _lines(channel: ChannelDiff, items_max: int) -> Iterator[str]:
    if channel.items is None:
        yield f"{printable(channel.channel)} ({channel.change})"
        for value in channel.values[:items_max]:
            yield _value_line(channel.channel, value)
        if len(channel.values) > items_max:
            yield f"  … {len(channel.values) - items_max} more changes"
        return
    items = channel.items
    removed, added = len(items.removed), len(items.added)
    stay = items.prefix + items.suffix
    counts = f"{stay} stay, {removed} removed, {added} added"
    yield f"{printable(channel.channel)} ({channel.change}): {counts}"
    for sign, found in (("-", items.removed), ("+", items.added)):
        for item in found[:items_max]:
            yield f"{sign} [{item.index}] {brief(item.value)}"
        if len(found) > items_max:
            yield f"  … {len(found) - items_max} more {'removed' if sign == '-' else 'added'}"


def _value_line(channel: str, value: ValueDiff) -> str:
    path: ValuePath = channel
    for key in value.path:
        path = (path, key)
    where = printable(shown_path(path))
    match value.change:
        case "added":
            return f"+ {where}: {brief(value.after)}"
        case "removed":
            return f"- {where}: {brief(value.before)}"
        case _:
            return f"~ {where}: {brief(value.before)} → {brief(value.after)}"


def brief(value: Any, characters: int = CHARACTERS_SHOWN) -> str:
    """Return a value in one short line; a message as its role and content."""
    text = _json(value)
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        said = next((value[name] for name in ("content", "blocks", "parts") if name in value), None)
        told = [_said(each) for each in (said, value.get("tool_calls")) if each]
        text = f"{value['role']}: {' '.join(told)}"
    text = printable(" ".join(text.split()))
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _said(content: Any) -> str:
    """Return the text of a message or of a block."""
    match content:
        case str():
            return content
        case list():
            return " ".join(map(_said, content))
        case {"text": str(text)}:
            return text
        case (
            {"name": str(name), "arguments": arguments}
            | {"name": str(name), "args": arguments}
            | {"name": str(name), "input": arguments}
        ):
            return f"{name}({arguments if isinstance(arguments, str) else _json(arguments)})"
        case {"function": {"name": str()} as called}:
            return _said(called)
        case {"content": said}:
            return _said(said)
        case None:
            return ""
        case _:
            return _json(content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def printable(text: str) -> str:
    """Return text on one line, without control characters."""
    on_one_line = re.sub(r"\r\n|[\r\n\t]", " ", text)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in on_one_line)
