"""The standard library's `dataclass`, except that `__init__` is compiled at its first use.

The package has hundreds of records, of which a program uses a few, and compiling the methods of all
of them took a third of `import holdfast`. A record is an ordinary dataclass in every other way:
`fields`, `replace`, `asdict`, patterns, pickles and type checkers find what they expect.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - it is exported
else:

    def dataclass(cls=None, /, **options):
        """Declare a dataclass, with the options of the standard library."""
        return functools.partial(_declare, **options) if cls is None else _declare(cls, **options)


def _declare(
    cls: type,
    *,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    slots: bool = False,
    **options: bool,
) -> type:
    if any(map(dataclasses.is_dataclass, cls.__mro__[1:])):
        # Whether its base is frozen is a question that the standard library asks.
        options |= {"repr": repr, "eq": eq, "frozen": frozen, "slots": slots}
        return dataclasses.dataclass(**options)(cls)
    own = vars(cls)
    has_hash = own.get("__hash__") is not None
    methods: dict[str, Any] = {}
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, **options)(cls)
    if repr:
        methods["__repr__"] = _repr(fields(made))
    if eq:
        methods["__eq__"] = _eq(fields(made))
        if not has_hash:
            methods["__hash__"] = _hash(fields(made)) if frozen else None
    if frozen:
        methods |= {"__setattr__": _refuse_set, "__delattr__": _refuse_delete}
        if slots:
            methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    for name, method in methods.items():
        if name == "__hash__" or name not in own:
            setattr(made, name, method)
    if "__init__" not in own:
        made.__init__ = _Init(made, frozen=frozen, slots=slots)
    parameters = made.__dataclass_params__
    parameters.init, parameters.repr, parameters.eq, parameters.frozen = True, repr, eq, frozen
    return made  # type: ignore[no-any-return]


class _Init:
    """Stands for the `__init__` of a dataclass until it is first looked up."""

    def __init__(self, cls: Any, **options: bool) -> None:
        self._cls = cls
        self._options = options

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        try:
            made = self._cls.__init__ = _compile_init(self._cls, **self._options)
        except RuntimeError as error:
            # Python 3.11 hides an interrupt in one, if it came while it was naming the fields.
            if isinstance(error.__cause__, KeyboardInterrupt | SystemExit):
                raise error.__cause__ from None
            raise
        return made if instance is None else MethodType(made, instance)


def _compile_init(cls: Any, *, frozen: bool, slots: bool) -> FunctionType:
    """Have the standard library compile the method, for another class with the same fields."""
    same = [(each.name, each.type, each) for each in fields(cls)]
    names: dict[str, Any] = {"__module__": cls.__module__}
    if hasattr(cls, "__post_init__"):
        names["__post_init__"] = cls.__post_init__
    twin: Any = dataclasses.make_dataclass(
        cls.__name__, same, namespace=names, repr=False, eq=False, frozen=frozen, slots=slots
    )
    made: FunctionType = twin.__init__
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made


def _repr(given: tuple[dataclasses.Field[Any], ...]) -> Any:
    names = [each.name for each in given if each.repr]

    @recursive_repr()
    def __repr__(self: Any) -> str:  # noqa: N807
        told = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{type(self).__qualname__}({told})"

    return __repr__


def _eq(given: tuple[dataclasses.Field[Any], ...]) -> Any:
    values = _values([each.name for each in given if each.compare])

    def __eq__(self: Any, other: object) -> bool:  # noqa: N807
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hash(given: tuple[dataclasses.Field[Any], ...]) -> Any:
    is_hashed = (each.compare if each.hash is None else each.hash for each in given)
    names = [each.name for each, hashed in zip(given, is_hashed, strict=True) if hashed]
    values = _values(names)

    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(values(self))

    return __hash__


def _values(names: list[str]) -> Any:
    """Return a function that returns the values of fields as something to compare."""
    return attrgetter(*names) if names else lambda _: ()


def _refuse_set(_: Any, name: str, __: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(_: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for each, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
