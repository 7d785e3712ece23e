"""The operations on a value as pure functions, for writing and for replaying."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

from ..arguments import require_whole, shown
from ..dataclass import dataclass
from ..errors import InvalidArgument, InvalidValue, TypeConflict
from ..wire import travels

KEY_CHARACTERS_MAX = 256
VERSION_MAX = 2**53

# The operations in events; a reducer appears as the operation that it stands for.
Operation = Literal["set", "delete", "increment", "append", "merge", "add", "remove", "min", "max"]
DocumentOperation = Literal["init", "full_replace", "patch", "restore"]
# The operations of a batch, and the name of each one's argument.
Asked = Literal["set", "delete", "increment", "append", "merge", "add", "remove", "reduce"]
ASKED: tuple[Asked, ...] = get_args(Asked)
ARGUMENTS: dict[Asked, str] = {
    "set": "value",
    "increment": "delta",
    "append": "items",
    "merge": "patch",
    "add": "item",
    "remove": "item",
    "reduce": "value",
}


# What a patch of the whole document may say about a key instead of a value to merge.
OPERATORS: dict[str, Operation] = {
    "$append": "append",
    "$increment": "increment",
    "$set": "set",
    "$delete": "delete",
}


class Missing:
    """Stands for the value of a key that does not exist."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Final = Missing()


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of one key."""

    operation: Operation | Asked
    key: str
    argument: Any = None
    if_version: int | None = None


def require_key(key: object) -> str:
    """Return a valid key: 1 to 256 characters, none of them a control character."""
    if not isinstance(key, str) or not 0 < len(key) <= KEY_CHARACTERS_MAX or _has_controls(key):
        raise InvalidArgument(
            f"key must be text of 1 to {KEY_CHARACTERS_MAX} characters without control "
            f"characters, not {shown(key)}"
        )
    return key


def _has_controls(key: str) -> bool:
    return not key.isprintable() and any(
        c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in key
    )


def require_if_version(version: object, label: str = "if_version") -> None:
    """Raise unless the value is None, 0 (the key must not exist) or a version."""
    if version is not None:
        require_whole(label, version, 0, VERSION_MAX)


def checked(mutation: Mutation) -> Mutation:
    """Return a mutation with a valid key, version and argument, or raise InvalidArgument."""
    require_key(mutation.key)
    require_if_version(mutation.if_version)
    argument = mutation.argument
    match mutation.operation:
        case "increment" if not _is_number(argument):
            raise InvalidArgument(f"increment takes a finite number, not {shown(argument)}")
        case "min" | "max" if not _is_number(argument):
            raise InvalidArgument(
                f"{mutation.operation} takes a finite number, not {shown(argument)}"
            )
        case "append" if type(argument) is not list:
            raise InvalidArgument(f"append takes a list of items, not {shown(argument)}")
        case "merge" if type(argument) is not dict:
            raise InvalidArgument(f"merge takes an object, not {shown(argument)}")
    return mutation


def parsed(given: object, position: int) -> Mutation:
    """Return one operation of a batch: `{"op": "set", "key": "k", "value": 1, "if_version": 2}`."""
    if isinstance(given, Mutation):
        return checked(given)
    where = f"operation {position}"
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{where} must be an object with op and key, not {shown(given)}")
    fields = dict(given)
    operation = fields.pop("op", None)
    if operation not in ASKED:
        known = ", ".join(ASKED)
        raise InvalidArgument(f"{where}: op must be one of {known}, not {shown(operation)}")
    key, if_version = fields.pop("key", None), fields.pop("if_version", None)
    name = ARGUMENTS.get(operation)
    if name is not None and name not in fields and operation != "increment":
        raise InvalidArgument(f"{where}: {operation} needs {name}")
    argument = fields.pop(name, 1) if name is not None else None
    if fields:
        unknown = ", ".join(map(shown, fields))
        raise InvalidArgument(f"{where}: {operation} does not take {unknown}")
    try:
        return checked(
            Mutation(operation=operation, key=key, argument=argument, if_version=if_version)
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from error


def applied(mutation: Mutation, value: Any) -> Any:
    """Return the value after a mutation, or raise TypeConflict."""
    if mutation.operation == "set":
        return mutation.argument
    if mutation.operation == "delete":
        return MISSING
    return REDUCED[mutation.operation](value, mutation.argument, mutation.key)


def _increment(value: Any, amount: Any, key: str) -> Any:
    if value is MISSING:
        return amount
    try:
        total = _number("increment", value, key) + amount
    except OverflowError:
        total = math.inf
    if type(total) is float and not math.isfinite(total):
        raise InvalidValue(f"{key!r} incremented by {shown(amount)} is not finite", path=key)
    return total


def _min(value: Any, number: Any, key: str) -> Any:
    return number if value is MISSING else min(_number("min", value, key), number)


def _max(value: Any, number: Any, key: str) -> Any:
    return number if value is MISSING else max(_number("max", value, key), number)


def _number(operation: str, value: Any, key: str) -> Any:
    if type(value) not in (int, float):
        raise _wrong_type(operation, key, value, "a number")
    return value


def _append(value: Any, items: list[Any], key: str) -> list[Any]:
    if value is MISSING:
        return items
    if type(value) is not list:
        raise _wrong_type("append", key, value, "a list")
    return value + items


def _merge(value: Any, patch: dict[str, Any], key: str) -> dict[str, Any]:
    if value is not MISSING and type(value) is not dict:
        raise _wrong_type("merge", key, value, "an object")
    merged: dict[str, Any] = merge_patch({} if value is MISSING else value, patch)
    return merged


def _add(value: Any, item: Any, key: str) -> list[Any]:
    members = _members("add", value, key)
    return list(members.values()) + ([] if _form(item) in members else [item])


def _remove(value: Any, item: Any, key: str) -> list[Any]:
    wanted = _form(item)
    return [each for form, each in _members("remove", value, key).items() if form != wanted]


def _form(value: Any) -> str:
    """Return a text that is the same for equal values; 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


REDUCED: dict[str, Callable[[Any, Any, str], Any]] = {
    "increment": _increment,
    "min": _min,
    "max": _max,
    "append": _append,
    "merge": _merge,
    "add": _add,
    "remove": _remove,
}


def merge_patch(target: Any, patch: Any) -> Any:
    """Return a value merged with a patch (RFC 7396); null removes a member."""
    if type(patch) is not dict:
        return patch
    merged = dict(target) if type(target) is dict else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def patched(
    document: dict[str, Any], patch: dict[str, Any], *, deep: bool, operators: bool
) -> dict[str, Any]:
    """Return a document merged with a patch: its keys are merged, replaced or operated on."""
    merged = dict(document)
    for key, given in patch.items():
        operator = operator_of(given) if operators else None
        before = merged.get(key, MISSING)
        if operator is not None:
            argument = None if operator == "$delete" else given[operator]
            after = applied(
                Mutation(operation=OPERATORS[operator], key=key, argument=argument), before
            )
        elif given is None:
            after = MISSING
        else:
            after = merge_patch(None if before is MISSING or not deep else before, given)
        if after is MISSING:
            merged.pop(key, None)
        else:
            merged[key] = after
    return merged


def operator_of(given: Any) -> str | None:
    """Return the operator that a key's whole value in a patch is, if it is one."""
    if type(given) is not dict or len(given) != 1:
        return None
    [name] = given
    return name if name in OPERATORS else None


def require_operators(patch: Mapping[str, Any]) -> None:
    """Refuse unknown operators, those beside other members, and arguments that do not fit them."""
    for key, given in patch.items():
        operator = operator_of(given)
        names = given if operator is None and type(given) is dict else ()
        if any(isinstance(name, str) and name.startswith("$") for name in names):
            known = ", ".join(OPERATORS)
            raise InvalidArgument(
                f"{shown(key)}: an operator is the only member of its object, and one of {known}; "
                f'write data with a $ as {{"$set": …}}, not {shown(given)}'
            )
        if operator == "$delete" and given[operator] is not True:
            raise InvalidArgument(f"{shown(key)}: $delete takes true, not {shown(given[operator])}")
        if operator is not None:
            checked(Mutation(operation=OPERATORS[operator], key=key, argument=given[operator]))


def _members(operation: str, value: Any, key: str) -> dict[str, Any]:
    """Return the members of a set by their forms."""
    if value is MISSING:
        return {}
    if type(value) is not list:
        raise _wrong_type(operation, key, value, "a set")
    members = {_form(each): each for each in value}
    if len(members) < len(value):
        raise TypeConflict(
            f"{operation} needs a set, but {key!r} is a list with equal members; nothing was "
            "changed",
            key=key,
            type="list",
        )
    return members


def _wrong_type(operation: str, key: str, value: Any, needed: str) -> TypeConflict:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    found = names.get(type(value), "a number")
    return TypeConflict(
        f"{operation} needs {needed}, but {key!r} is {found}; nothing was changed",
        key=key,
        type=type(value).__name__,
    )


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))
