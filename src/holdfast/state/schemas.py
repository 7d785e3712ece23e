"""JSON Schemas of keys: whether one can be used, and whether a value fits it.

References are followed inside a schema only; nothing is ever fetched.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..arguments import shown
from ..errors import InvalidArgument, InvalidValue, StoreError
from ..kernel.operation import PerStore, Runtime

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

VALIDATORS_KEPT = 256
MESSAGE_CHARACTERS_MAX = 200
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# What the library raises for schemas that its own check lets pass, and for huge numbers.
UNUSABLE = (ValueError, ArithmeticError, re.error)


class Schemas(PerStore):
    """The schemas that this process has used lately, each ready to check values."""

    def __init__(self, runtime: Runtime) -> None:
        self._codec = runtime.codec
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Validator] = OrderedDict()

    def require_fit(self, body: bytes, key: str, value: Any) -> None:
        """Raise InvalidValue unless the value fits the schema, given as it is encoded."""
        with self._lock:
            validator = self._known.pop(body, None)
        if validator is None:
            # One from an imported file was not checked before.
            validator = _validator(require_schema(key, self._codec.decode(body)))
        with self._lock:
            self._known[body] = validator
            if len(self._known) > VALIDATORS_KEPT:
                self._known.popitem(last=False)
        _require_fit(validator, key, value)


def require_schema(key: str, schema: object) -> dict[str, Any]:
    """Return a schema that values can be checked against, or raise InvalidArgument."""
    if type(schema) is not dict:
        raise InvalidArgument(f"the schema of {key!r} must be an object, not {shown(schema)}")
    refused = f"the schema of {key!r} cannot be used"
    jsonschema, dialect = _library(), schema.get("$schema", "")
    kind = _kind(schema) if type(dialect) is str else None
    if kind is None:
        raise InvalidArgument(f"{refused}: the dialect {shown(dialect)} is not known")
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
        outside = list(_unresolved(schema, kind.META_SCHEMA["$schema"]))
        # One that refers to itself without end fails on any value.
        list(_validator(schema).iter_errors(None) if not outside else ())
    except jsonschema.SchemaError as error:
        raise InvalidArgument(f"{refused} at {error.json_path}: {_reason(error)}") from None
    except RecursionError:
        why = "it is nested too deeply, or refers to itself without end"
        raise InvalidArgument(f"{refused}: {why}") from None
    except UNUSABLE as error:
        raise InvalidArgument(f"{refused}: {error}") from None
    if outside:
        why = f"{shown(outside[0])} is no part of it, and addresses are not fetched"
        raise InvalidArgument(f"{refused}: {why}")
    return schema


def _library() -> Any:
    try:
        import jsonschema
        import jsonschema.validators
    except ImportError as error:
        raise StoreError(
            "checking a JSON Schema needs a package: "
            'pip install "holdfast-agents[schema]"; nothing was changed.'
        ) from error
    return jsonschema


def _kind(schema: dict[str, Any]) -> Any:
    """Return the class that checks a schema of its dialect; None if that is not known."""
    validators = _library().validators
    default = None if schema.get("$schema") else validators.Draft202012Validator
    return validators.validator_for(schema, default=default)


def _validator(schema: dict[str, Any]) -> Validator:
    from referencing import Registry

    validator: Validator = _kind(schema)(schema, registry=Registry())
    return validator


def _unresolved(schema: dict[str, Any], dialect: str) -> Iterator[str]:
    """Yield the references that lead out of a schema, or nowhere."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    specification = specification_with(dialect)
    resource = specification.create_resource(schema)
    registry: Registry[Any] = Registry()
    waiting = [(resource, registry.resolver_with_root(resource))]
    while waiting:
        part, resolver = waiting.pop()
        contents = part.contents if isinstance(part.contents, dict) else {}
        for name in REFERENCES:
            if isinstance(reference := contents.get(name), str):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    yield reference
        waiting += [(each, resolver.in_subresource(each)) for each in part.subresources()]


def _require_fit(validator: Validator, key: str, value: Any) -> None:
    try:
        error: Any = next(validator.iter_errors(value), None)
    except (RecursionError, *UNUSABLE) as failure:
        raise InvalidValue(
            f"{key!r} cannot be checked against its schema ({type(failure).__name__}); nothing "
            "was changed",
            path=key,
        ) from failure
    if error is not None:
        path = f"{key}{error.json_path.removeprefix('$')}"
        where = "" if path == key else f" at {path}"
        raise InvalidValue(
            f"{key!r} would not fit its schema{where}: {_reason(error)}; nothing was changed",
            path=path,
        )


def _reason(error: Any) -> str:
    """Return what is wrong in a few words; the library's own quote the whole value."""
    if len(error.message) <= MESSAGE_CHARACTERS_MAX:
        return str(error.message)
    return f"{error.validator} is {shown(error.validator_value)}, and it is {shown(error.instance)}"
