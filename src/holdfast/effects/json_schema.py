"""The JSON schema of a tool's arguments, made from its type hints, and their validation.

A model gets the schema and sends plain JSON data. Validation errors say what is wrong and where, so
that a model can correct it. `typed_arguments` converts to the hinted types (a dataclass, an enum, a
datetime), while the ledger stores the plain data.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec
from msgspec import UNSET

from ..dataclass import dataclass
from ..errors import InvalidArgument, InvalidValue

INJECTED = ("idempotency_key",)
REFERENCE = "#/$defs/{name}"
_HEADING = re.compile(r"\s*(?:Args|Arguments|Parameters)\s*:\s*")
_ENTRY = re.compile(r"(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD = re.compile(r"\s*:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """The arguments of one function, as a msgspec type and its JSON schema."""

    name: str
    type: type[msgspec.Struct]
    parameters: dict[str, Any]
    takes_any: bool

    def check(self, arguments: object) -> tuple[msgspec.Struct, dict[str, Any]]:
        """Return the named arguments and those taken by `**`, or raise InvalidValue."""
        known = self.parameters["properties"]
        if not isinstance(arguments, Mapping):
            kind = type(arguments).__name__
            message = f"{self.name}: the arguments must be a JSON object, not {kind}"
            raise InvalidValue(message, path="$")
        try:
            checked = msgspec.convert(dict(arguments), self.type)
        except msgspec.ValidationError as error:
            path = str(error).rpartition(" - at ")[2].strip("`") if " - at " in str(error) else "$"
            message = f"{self.name}: {error} (its arguments are: {', '.join(known) or 'none'})"
            raise InvalidValue(message, path=path) from None
        others = arguments.items() if self.takes_any else ()
        return checked, {name: value for name, value in others if name not in known}


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments, without injected ones.

    Raises InvalidArgument, naming the parameter, if a hint has no JSON schema.
    """
    return signature_of(function).parameters


def plain_arguments(function: Callable[..., Any], arguments: object) -> dict[str, Any]:
    """Return the arguments as normalized plain data, or raise InvalidValue.

    5 for a float becomes 5.0, so that identical calls are equal. Defaults are not filled in.
    """
    checked, others = signature_of(function).check(arguments)
    return {**others, **msgspec.to_builtins(checked)}


def typed_arguments(function: Callable[..., Any], arguments: object) -> dict[str, Any]:
    """Return the arguments converted to the hinted types, or raise InvalidValue."""
    checked, others = signature_of(function).check(arguments)
    found = {name: getattr(checked, name) for name in checked.__struct_fields__}
    return {**others, **{name: value for name, value in found.items() if value is not UNSET}}


def taking_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that takes plain data and converts it to the hinted types."""

    def typed(arguments: dict[str, Any]) -> dict[str, Any]:
        injected = {name: arguments[name] for name in INJECTED if name in arguments}
        plain = {name: value for name, value in arguments.items() if name not in INJECTED}
        return {**typed_arguments(function, plain), **injected}

    @functools.wraps(function)
    async def called_async(**arguments: Any) -> Any:
        return await function(**typed(arguments))

    @functools.wraps(function)
    def called(**arguments: Any) -> Any:
        return function(**typed(arguments))

    return called_async if inspect.iscoroutinefunction(function) else called


@functools.lru_cache(maxsize=1024)
def signature_of(function: Callable[..., Any]) -> ToolSignature:
    """Return the signature, read once per function from its hints and docstring."""
    name = getattr(function, "__name__", type(function).__name__)
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    hints = _hints(function, name)
    wanted = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name not in INJECTED and parameter.kind is not parameter.VAR_KEYWORD
    ]
    fields = [_field(parameter, hints.get(parameter.name, Any)) for parameter in wanted]
    defined = msgspec.defstruct(
        "ToolArguments", fields, kw_only=True, forbid_unknown_fields=not takes_any
    )
    schema = _schema(name, defined, fields)
    descriptions = _descriptions(function)
    for parameter in wanted:
        described = schema["properties"].get(parameter.name, {})
        if parameter.default is not parameter.empty and _is_plain(parameter.default):
            described["default"] = parameter.default
        if parameter.name in descriptions:
            described.setdefault("description", descriptions[parameter.name])
    return ToolSignature(name, defined, schema, takes_any)


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidArgument(
            f"tool {name}: {error}, so its arguments cannot be described; define or import the "
            "names in its type hints at the top of the module"
        ) from None


def _field(parameter: inspect.Parameter, hint: Any) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.default is parameter.empty:
        return parameter.name, hint
    # A missing argument stays missing; the function applies its own default.
    return parameter.name, hint | msgspec.UnsetType if hint is not Any else Any, UNSET


def _schema(name: str, defined: type[msgspec.Struct], fields: list[Any]) -> dict[str, Any]:
    try:
        (top,), definitions = msgspec.json.schema_components([defined], ref_template=REFERENCE)
    except TypeError as error:
        why = str(error).splitlines()[-1]
        guilty = next((field[0] for field in fields if not _is_describable(field[1])), None)
        where = f"parameter {guilty!r}" if guilty else "its arguments"
        raise InvalidArgument(
            f"tool {name}: {where} cannot be described as JSON ({why}); use text, numbers, "
            "lists, dicts, Literal, Optional, dataclasses or TypedDict"
        ) from None
    schema = definitions.pop(top["$ref"].rpartition("/")[2])
    schema.pop("title", None)
    schema.setdefault("properties", {})
    schema.setdefault("required", [])
    return {**schema, "$defs": definitions} if definitions else schema


def _is_describable(hint: Any) -> bool:
    try:
        msgspec.json.schema_components([hint], ref_template=REFERENCE)
    except TypeError:
        return False
    return True


def _is_plain(value: object) -> bool:
    try:
        return bool(msgspec.json.decode(msgspec.json.encode(value)) == value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return False


def _descriptions(function: Callable[..., Any]) -> dict[str, str]:
    """Return the parameter descriptions of a docstring in Google or Sphinx style."""
    found: dict[str, str] = {}
    indent: int | None = None
    is_inside = False
    current = ""
    for line in (inspect.getdoc(function) or "").splitlines():
        if match := _FIELD.fullmatch(line):
            found[match[1]] = match[2]
        if _HEADING.fullmatch(line):
            is_inside, indent = True, None
        elif is_inside and line.strip() and not line.startswith((" ", "\t")):
            is_inside = False
        elif is_inside and (match := _ENTRY.fullmatch(line)) and indent in {None, len(match[1])}:
            current, indent = match[2], len(match[1])
            found[current] = match[3]
        elif is_inside and current and line.strip():
            found[current] = f"{found[current]} {line.strip()}".strip()
    return found
