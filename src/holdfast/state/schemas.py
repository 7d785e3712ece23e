"""JSON Schemas of keys: checking a schema, and validating values.

References are resolved within a schema only; nothing is ever fetched.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..arguments import shown
from ..codec import Codec
from ..errors import InvalidArgument, InvalidValue
from ..kernel.operation import PerStore, Runtime

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

VALIDATORS_KEPT = 256
MESSAGE_CHARACTERS_MAX = 200
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Raised by the library's Rust part when Python's stack is exhausted.
PANIC = "PanicException"


class Validators:
    """A cache of validators for recently used schemas."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Validator] = OrderedDict()

    def require_fit(self, body: bytes, key: str, value: Any) -> None:
        """Raise InvalidValue unless the value matches the schema, given encoded."""
        with self._lock:
            validator = self._known.pop(body, None)
        if validator is None:
            # An imported one may have been checked by another version of the library.
            validator = _validator(require_schema(key, self._codec.decode(body)))
        with self._lock:
            self._known[body] = validator
            if len(self._known) > VALIDATORS_KEPT:
                self._known.popitem(last=False)
        _require_fit(validator, key, value)


class Schemas(Validators, PerStore):
    """The validators of an open store."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.codec)


def require_schema(key: str, schema: object) -> dict[str, Any]:
    """Return a valid schema, or raise InvalidArgument."""
    if type(schema) is not dict:
        raise InvalidArgument(f"the schema of {shown(key)} must be an object, not {shown(schema)}")
    refused = f"the schema of {shown(key)} cannot be used"
    jsonschema, dialect = _library(), schema.get("$schema", "")
    kind = _kind(schema) if type(dialect) is str else None
    if kind is None:
        raise InvalidArgument(f"{refused}: the dialect {shown(dialect)} is not known")
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
        outside = list(_unresolved(schema, kind))
        # A schema with endless recursion fails on any value.
        list(_validator(schema).iter_errors(None) if not outside else ())
    except jsonschema.SchemaError as error:
        raise InvalidArgument(f"{refused} at {error.json_path}: {_reason(error)}") from None
    except BaseException as error:
        if not _is_failure(error):
            raise
        why = f"{type(error).__name__}: {shown(str(error))}"
        if isinstance(error, RecursionError) or type(error).__name__ == PANIC:
            why = "it is nested too deeply, or refers to itself endlessly"
        raise InvalidArgument(f"{refused}: {why}") from None
    if outside:
        why = f"{shown(outside[0])} is not part of it, and references are not fetched"
        raise InvalidArgument(f"{refused}: {why}")
    return schema


def _is_failure(error: BaseException) -> bool:
    """Whether the library failed, which it does in many ways on schemas that pass its own check."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC


def _library() -> Any:
    from ..extras import required

    with required("checking a JSON Schema", "schema"):
        import jsonschema
        import jsonschema.validators
    return jsonschema


def _kind(schema: dict[str, Any]) -> Any:
    """Return the validator class for a schema's dialect, or None if it is unknown."""
    validators = _library().validators
    default = None if schema.get("$schema") else validators.Draft202012Validator
    return validators.validator_for(schema, default=default)


def _validator(schema: dict[str, Any]) -> Validator:
    from referencing import Registry

    kind = _library().validators.extend(_kind(schema), {"uniqueItems": _unique_items})
    validator: Validator = kind(schema, registry=Registry())
    return validator


def _unique_items(validator: Any, is_wanted: Any, items: Any, _: Any) -> Iterator[Any]:
    """Yield an error if items are equal; unlike the library's check, in linear time."""
    if is_wanted and validator.is_type(items, "array"):
        forms = {json.dumps(_comparable(each), sort_keys=True) for each in items}
        if len(forms) < len(items):
            yield _library().ValidationError(f"{shown(items)} has non-unique elements")


def _comparable(value: Any) -> Any:
    """Return a value whose JSON is the same for equal values: 1 equals 1.0, but not true."""
    if type(value) is float and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _comparable(each) for name, each in value.items()}
    return [_comparable(each) for each in value] if isinstance(value, list) else value


def _unresolved(schema: dict[str, Any], kind: Any) -> Iterator[str]:
    """Yield references that cannot be resolved within the schema; check the targets of others."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    specification = specification_with(kind.META_SCHEMA["$schema"])
    resource = specification.create_resource(schema)
    registry: Registry[Any] = Registry()
    waiting = [(resource, registry.resolver_with_root(resource))]
    followed: set[int] = set()
    while waiting:
        part, resolver = waiting.pop()
        contents = part.contents if isinstance(part.contents, dict) else {}
        for name in REFERENCES:
            if isinstance(reference := contents.get(name), str):
                try:
                    found = resolver.lookup(reference)
                except Unresolvable:
                    yield reference
                    continue
                if id(found.contents) not in followed:
                    followed.add(id(found.contents))
                    kind.check_schema(found.contents, format_checker=kind.FORMAT_CHECKER)
                    target = specification.create_resource(found.contents)
                    waiting.append((target, found.resolver))
        waiting += [(each, resolver.in_subresource(each)) for each in part.subresources()]


def _require_fit(validator: Validator, key: str, value: Any) -> None:
    try:
        error: Any = next(validator.iter_errors(value), None)
    except BaseException as failure:
        if not _is_failure(failure):
            raise
        raise InvalidValue(
            f"{key!r} cannot be checked against its schema ({type(failure).__name__}); nothing "
            "was changed",
            path=key,
        ) from failure
    if error is not None:
        path = f"{key}{error.json_path.removeprefix('$')}"
        where = "" if path == key else f" at {path}"
        raise InvalidValue(
            f"{key!r} would not match its schema{where}: {_reason(error)}; nothing was changed",
            path=path,
        )


def _reason(error: Any) -> str:
    """Return a short reason; the library's own message may quote the whole value."""
    if len(error.message) <= MESSAGE_CHARACTERS_MAX:
        return str(error.message)
    return f"{error.validator} is {shown(error.validator_value)}, and it is {shown(error.instance)}"
