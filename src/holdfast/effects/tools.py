"""Tools: functions that declare their effects, and what to do when an outcome is unknown.

A tool's arguments have a JSON schema, made from its type hints. A model gets the schema and sends
plain JSON data; validation errors say what is wrong and where, so that a model can correct it.
`typed_arguments` converts to the hinted types (a dataclass, an enum, a datetime), while the ledger
stores the plain data.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import (
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_args,
    get_type_hints,
    overload,
)

import msgspec
from msgspec import UNSET

from ..arguments import require_one_of, require_seconds, require_text, require_whole, shown
from ..dataclass import dataclass
from ..errors import InvalidArgument, InvalidValue
from ..kernel.flow import require_function
from ..leases import lease_milliseconds
from ..records import EffectKind
from ..wire import travels

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

LEASE_SECONDS = 15.0
WAIT_SECONDS = 60.0
SECONDS_MAX = 7 * 24 * 3600.0
TTL_SECONDS_MAX = 100 * 366 * 24 * 3600.0
KEY = "idempotency_key"
RESERVED = ("call_id", "wait_seconds")
REFERENCE = "#/$defs/{name}"
_HEADING = re.compile(r"\s*(?:Args|Arguments|Parameters)\s*:\s*")
_ENTRY = re.compile(r"(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_FIELD = re.compile(r"\s*:param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")

OnUnknown = Literal["retry", "fail", "park"]
Policy = Literal["session", "latest", "call", "global"]
DEDUPE_POLICIES: tuple[Policy, ...] = get_args(Policy)
DEFAULT_POLICY: dict[EffectKind, Policy] = {
    "read": "call",
    "write": "latest",
    "mutate": "session",
}


@travels
@dataclass(frozen=True, slots=True)
class Landed:
    """The effect happened; `result` is what the tool would have returned."""

    result: Any = None


@travels
@dataclass(frozen=True, slots=True)
class NotLanded:
    """The effect did not happen and will not; it may be run again."""


@travels
@dataclass(frozen=True, slots=True)
class Unknown:
    """The outcome of the effect is unknown."""

    why: str = ""


Verdict: TypeAlias = Landed | NotLanded | Unknown
Verify: TypeAlias = Callable[[dict[str, Any], str], Any]
Undo: TypeAlias = Callable[[dict[str, Any], Any, str], Any]


# What the ledger asks of a tool.
_RULES = (
    "name", "effect", "atomic", "on_unknown", "max_attempts", "timeout_seconds", "settle_seconds",
    "lease_seconds", "cache_failures", "ttl_seconds", "outside",
)  # fmt: skip


def _at_client() -> None:
    raise InvalidArgument("the functions of this tool are in the client")


_HOOK_AT_CLIENT: Any = _at_client


@travels
@dataclass(frozen=True, kw_only=True)
class Tool(Generic[P, R_co]):
    """A function with its rules for the ledger. Called directly, it runs without the ledger."""

    function: Callable[P, R_co]
    name: str
    effect: EffectKind
    verify: Verify | None = None
    undo: Undo | None = None
    atomic: bool = False
    on_unknown: OnUnknown = "park"
    max_attempts: int | None = None
    dedupe: Policy | Callable[[dict[str, Any]], Any]
    timeout_seconds: float | None = None
    settle_seconds: float = 0.0
    lease_seconds: float | None = None
    cache_failures: bool = False
    ttl_seconds: float | None = None
    outside: bool = False
    wait_seconds: float = WAIT_SECONDS
    takes_key: bool = field(init=False)
    takes_item: bool = field(init=False)
    signature: inspect.Signature = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)
        try:
            signature = inspect.signature(self.function)
        except ValueError:
            name = shown(self.function)
            raise InvalidArgument(f"{name} has no readable signature; wrap it in a def") from None
        _check_parameters(self.name, signature)
        object.__setattr__(self, "signature", signature)
        object.__setattr__(self, "takes_key", KEY in signature.parameters)
        object.__setattr__(self, "takes_item", "item" in signature.parameters)
        # So that help(), inspect and editors show the function.
        for name in ("__doc__", "__name__", "__qualname__", "__module__"):
            object.__setattr__(self, name, getattr(self.function, name, None))
        object.__setattr__(self, "__wrapped__", self.function)

    def _to_wire(self) -> tuple[Any, ...]:
        """Return the rules; the functions stay where they are."""
        rules = [getattr(self, name) for name in _RULES]
        return (*rules, self.verify is not None, self.undo is not None)

    @classmethod
    def _from_wire(
        cls,
        runtime: Any,
        name: str,
        effect: EffectKind,
        atomic: bool,
        on_unknown: OnUnknown,
        max_attempts: int | None,
        timeout_seconds: float | None,
        settle_seconds: float,
        lease_seconds: float | None,
        cache_failures: bool,
        ttl_seconds: float | None,
        outside: bool,
        has_verify: bool,
        has_undo: bool,
    ) -> Tool[..., Any]:
        """Return a tool whose functions are at the client."""
        given = locals()
        return Tool(
            function=_at_client,
            verify=_HOOK_AT_CLIENT if has_verify else None,
            undo=_HOOK_AT_CLIENT if has_undo else None,
            dedupe="session",
            **{rule: given[rule] for rule in _RULES},
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function, without the ledger."""
        return self.function(*args, **kwargs)

    @property
    def description(self) -> str:
        """The function's docstring."""
        return inspect.getdoc(self.function) or ""

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments, without injected ones."""
        return parameters_of(self.function)

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, without defaults, or raise InvalidArgument."""
        accepted, required = self._names
        if type(arguments) is dict and required <= arguments.keys() <= accepted:
            return arguments.copy()
        if not isinstance(arguments, Mapping):
            raise InvalidArgument(
                f"{self.name} takes its arguments by name, in a dict, not as "
                f"{type(arguments).__name__}"
            )
        if KEY in arguments:
            raise InvalidArgument(f"{KEY} is set by Holdfast and cannot be passed")
        extra = {KEY: ""} if self.takes_key else {}
        try:
            self.signature.bind(**arguments, **extra)
        except TypeError as error:
            # What is missing is often there under another name.
            unknown = ", ".join(shown(name) for name in arguments if name not in accepted)
            takes = ", ".join(each for each in self.signature.parameters if each in accepted)
            hint = f"; it takes {takes or 'no arguments'}, not {unknown}"
            is_told = bool(unknown) and not self._takes_others
            raise InvalidArgument(f"{self.name}: {error}{hint if is_told else ''}") from None
        return dict(arguments)

    @functools.cached_property
    def _names(self) -> tuple[frozenset[str], frozenset[str]]:
        """The accepted and the required names of arguments; `**` takes others."""
        named = [
            parameter
            for parameter in self.signature.parameters.values()
            if parameter.kind != parameter.VAR_KEYWORD and parameter.name != KEY
        ]
        required = [parameter for parameter in named if parameter.default is parameter.empty]
        accepted = frozenset(parameter.name for parameter in named)
        return accepted, frozenset(parameter.name for parameter in required)

    @property
    def _takes_others(self) -> bool:
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        return inspect.Parameter.VAR_KEYWORD in kinds

    @functools.cached_property
    def lease_ms(self) -> int:
        """How long a call is owned without a heartbeat: longer than its timeout."""
        seconds = self.lease_seconds
        if seconds is None:
            seconds = max(LEASE_SECONDS, (self.timeout_seconds or 0) * 1.5)
        return lease_milliseconds(min(seconds, SECONDS_MAX))

    @functools.cached_property
    def timeout_ms(self) -> int:
        """How long a call may take; 0 is no limit."""
        return round((self.timeout_seconds or 0) * 1000)

    @functools.cached_property
    def settle_ms(self) -> int:
        """How long a request may still take effect after its call has ended."""
        return round(self.settle_seconds * 1000)

    @functools.cached_property
    def is_irreversible(self) -> bool:
        """Whether its effects cannot be undone."""
        return self.effect == "mutate" and self.undo is None

    @functools.cached_property
    def if_unknown(self) -> OnUnknown:
        """What to do when an outcome stays unknown; calls that are safe to repeat are retried."""
        is_repeatable = self.effect != "mutate" and self.verify is None
        return "retry" if is_repeatable else self.on_unknown


# What `tool` takes.
OPTIONS = tuple(each.name for each in fields(Tool) if each.init and each.name != "function")


@overload
def tool(function: Callable[P, R_co], /) -> Tool[P, R_co]: ...
@overload
def tool(
    *,
    effect: EffectKind = "mutate",
    name: str | None = None,
    verify: Verify | None = None,
    undo: Undo | None = None,
    atomic: bool = False,
    on_unknown: OnUnknown = "park",
    max_attempts: int | None = None,
    dedupe: Policy | Callable[[dict[str, Any]], Any] | None = None,
    timeout_seconds: float | None = None,
    settle_seconds: float = 0.0,
    lease_seconds: float | None = None,
    cache_failures: bool = False,
    ttl_seconds: float | None = None,
    outside: bool = False,
    wait_seconds: float = WAIT_SECONDS,
) -> Callable[[Callable[P, R_co]], Tool[P, R_co]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    effect: EffectKind = "mutate",
    name: str | None = None,
    dedupe: Policy | Callable[[dict[str, Any]], Any] | None = None,
    **rules: Any,
) -> Any:
    """Turn a function into a tool.

    `read` has no effect, `write` is idempotent, and `mutate`, the default, is not safe to repeat.
    `verify(args, idempotency_key)` returns whether a call in doubt landed. Without it, `on_unknown`
    decides: "park" it for a person, "fail", or "retry" (the receiver must then honour the key).
    After `max_attempts` attempts whose owners died, the effect is parked instead of retried.
    `atomic` means that an exception proves that nothing happened. `dedupe` decides which calls
    are the same effect. `undo(args, result, idempotency_key)` reverses an effect. `outside` says
    that it acts on what no world rolls back: a rollback of the store leaves its effects in place.
    """

    for option in rules:
        if option not in OPTIONS:
            raise InvalidArgument(
                f"tool() has no option {shown(option)}; it has {', '.join(OPTIONS)}"
            )

    def make(function: Callable[..., Any]) -> Tool[..., Any]:
        if not callable(function):
            raise InvalidArgument(f"a tool must be a function, not {type(function).__name__}")
        require_one_of("effect", effect, DEFAULT_POLICY)
        label = name if name is not None else getattr(function, "__name__", "")
        policy = DEFAULT_POLICY[effect] if dedupe is None else dedupe
        return Tool(function=function, name=label, effect=effect, dedupe=policy, **rules)

    return make if function is None else make(function)


def named_tool(name: str, effect: EffectKind) -> Tool[..., Any]:
    """Return a tool without a function, for a caller that runs it itself."""

    def function(**_: Any) -> None:
        """Do nothing; never called."""

    return tool(effect=effect, name=name)(function)


def by_name(tools: object) -> dict[str, Tool[..., Any]]:
    """Return tools by name; raise if two have the same name."""
    if tools is None:
        return {}
    if not isinstance(tools, list | tuple):
        raise InvalidArgument(f"tools must be a list of tools, not {type(tools).__name__}")
    found: dict[str, Tool[..., Any]] = {}
    for each in tools:
        known = require_tool(each)
        if found.setdefault(known.name, known) is not known:
            raise InvalidArgument(f"there are two tools named {shown(known.name)}")
    return found


def require_tool(tool: object) -> Tool[..., Any]:
    """Return a tool; raise InvalidArgument for anything else."""
    if not isinstance(tool, Tool):
        name = getattr(tool, "__name__", None) or shown(tool)
        raise InvalidArgument(f"{name} is not a tool; put @holdfast.tool(effect=…) above it")
    return tool


def _check_parameters(name: str, signature: inspect.Signature) -> None:
    for parameter in signature.parameters.values():
        if parameter.name in RESERVED:
            raise InvalidArgument(
                f"tool {name}: a parameter cannot be named {shown(parameter.name)}, which is "
                "reserved for session.call"
            )
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL}:
            raise InvalidArgument(
                f"tool {name}: arguments are passed by name, {shown(parameter.name)} cannot be"
            )


def _check(tool: Tool[..., Any]) -> None:
    name = tool.name
    require_text("a tool's name", name)
    require_one_of(f"tool {name}: effect", tool.effect, DEFAULT_POLICY)
    require_one_of(f"tool {name}: on_unknown", tool.on_unknown, get_args(OnUnknown))
    require_function(f"tool {name}", tool.function)
    if callable(tool.dedupe):
        require_function(f"tool {name}: dedupe", tool.dedupe)
    else:
        require_one_of(
            f"tool {name}: dedupe, unless it is a function,", tool.dedupe, DEDUPE_POLICIES
        )
    if tool.max_attempts is not None:
        require_whole(f"tool {name}: max_attempts", tool.max_attempts, 1)
    for label, hook in (("verify", tool.verify), ("undo", tool.undo)):
        if hook is not None:
            require_function(f"tool {name}: {label}", hook)
    if tool.lease_seconds is not None:
        lease_milliseconds(tool.lease_seconds)
    require_duration("timeout_seconds", tool.timeout_seconds, may_be_zero=False)
    if (tool.timeout_seconds or 0) >= (tool.lease_seconds or SECONDS_MAX + 1):
        raise InvalidArgument(
            f"tool {name}: timeout_seconds ({tool.timeout_seconds:g}) must be shorter than "
            f"lease_seconds ({tool.lease_seconds:g}), or it could be taken over while it runs; "
            "omit lease_seconds, and a sufficient lease is chosen"
        )
    require_duration("settle_seconds", tool.settle_seconds)
    require_duration("wait_seconds", tool.wait_seconds)
    require_duration("ttl_seconds", tool.ttl_seconds, TTL_SECONDS_MAX, may_be_zero=False)


def require_duration(
    label: str, seconds: object, most: float = SECONDS_MAX, *, may_be_zero: bool = True
) -> None:
    """Raise unless the value is None or a number of seconds within bounds."""
    if seconds is not None:
        require_seconds(label, seconds, most, may_be_least=may_be_zero)


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
        injected = {name: arguments[name] for name in (KEY,) if name in arguments}
        plain = {name: value for name, value in arguments.items() if name != KEY}
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
        if parameter.name != KEY and parameter.kind is not parameter.VAR_KEYWORD
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
