"""Our dataclasses do what those of the standard library do, and compile nothing before its use."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, TypeAlias

import pytest

from holdfast import dataclass as module

Declare: TypeAlias = Callable[..., Any]


def declare(dataclass: Declare, name: str, **options: Any) -> Any:
    """Return a class that uses what the package uses."""

    class Declared:
        """A record."""

        a: int
        b: str = "x"
        c: list[int] = field(default_factory=list)
        d: Any = field(default=None, compare=False, repr=False)
        e: int = field(default=7, init=False)
        f: int = field(init=False, default=0, kw_only=True)

        def __post_init__(self) -> None:
            object.__setattr__(self, "f", self.a + 1)

        def double(self) -> int:
            return 2 * self.a

    Declared.__name__ = Declared.__qualname__ = name
    return dataclass(**options)(Declared)


OPTIONS = [
    {"frozen": frozen, "slots": slots, "kw_only": kw_only, "eq": eq}
    for frozen in (False, True)
    for slots in (False, True)
    for kw_only in (False, True)
    for eq in (False, True)
]
# Where pickle finds them.
OURS = [declare(module.dataclass, f"Ours{n}", **each) for n, each in enumerate(OPTIONS)]
THEIRS = [declare(dataclasses.dataclass, f"Ours{n}", **each) for n, each in enumerate(OPTIONS)]
globals().update({each.__name__: each for each in OURS})
pairs = pytest.mark.parametrize(
    ("ours", "theirs", "options"), list(zip(OURS, THEIRS, OPTIONS, strict=True)), ids=lambda _: ""
)


def outcome(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


CALLS: list[Callable[[Any], Any]] = [
    lambda cls: repr(cls(a=1)),
    lambda cls: repr(cls(1, "y")),
    lambda cls: repr(cls(a=1, b="y", c=[2], d=3)),
    lambda cls: cls(),
    lambda cls: cls(a=1, z=2),
    lambda cls: cls(a=1, e=2),
    lambda cls: cls(a=1) == cls(a=1, d=5),
    lambda cls: cls(a=1) == cls(a=2),
    lambda cls: cls(a=1) == 1,
    lambda cls: hash(cls(a=1, c=())) == hash(cls(a=1, c=(), d=5)),
    lambda cls: cls(a=1).double(),
    lambda cls: cls(a=1).c is cls(a=1).c,
    lambda cls: setattr(cls(a=1), "a", 2),
    lambda cls: delattr(cls(a=1), "a"),
    lambda cls: dataclasses.asdict(cls(a=1, c=[1])),
    lambda cls: repr(dataclasses.replace(cls(a=1), a=5)),
    lambda cls: [(each.name, each.type, each.kw_only) for each in dataclasses.fields(cls)],
    lambda cls: cls.__match_args__,
    lambda cls: str(inspect.signature(cls)),
    lambda cls: cls.__init__.__annotations__,
    lambda cls: repr(copy.copy(cls(a=1, c=[2]))),
    lambda cls: repr(copy.deepcopy(cls(a=1, c=[2]))),
    lambda cls: hasattr(cls(a=1), "__dict__"),
    lambda cls: repr(cls.__dataclass_params__),
    lambda cls: cls.__hash__ is None,
    lambda cls: cls.__doc__,
]


@pairs
def test_a_record_does_what_a_dataclass_does(
    ours: Any, theirs: Any, options: dict[str, bool]
) -> None:
    for number, call in enumerate(CALLS):
        found, expected = outcome(lambda: call(ours)), outcome(lambda: call(theirs))  # noqa: B023
        assert found == expected, (number, options)


@pairs
def test_a_record_is_pickled(ours: Any, theirs: Any, options: dict[str, bool]) -> None:
    record = ours(a=1, c=[3], d={"x": 1})
    again = pickle.loads(pickle.dumps(record))  # noqa: S301
    assert repr(again) == repr(record)
    assert again.d == {"x": 1}


def test_what_a_class_defines_itself_is_kept() -> None:
    @module.dataclass(frozen=True)
    class Own:
        a: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    assert repr(Own(1)) == "own"
    assert Own(1) == Own(2)
    assert hash(Own(1)) == 5


def test_a_subclass_adds_fields() -> None:
    @module.dataclass(frozen=True, slots=True)
    class Base:
        a: int

    @module.dataclass(frozen=True, slots=True)
    class Derived(Base):
        b: int = 2

    assert repr(Derived(1)).endswith("Derived(a=1, b=2)")
    assert Derived(1) == Derived(1, 2)
    assert Derived(1) != Base(1)
    with pytest.raises(FrozenInstanceError):
        Derived(1).a = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="frozen"):

        @dataclasses.dataclass
        class Changeable(Base):  # type: ignore[misc]
            b: int = 2


def test_a_record_that_contains_itself_has_a_repr() -> None:
    @module.dataclass(slots=True)
    class Node:
        next: Any = None

    node = Node()
    node.next = node
    assert repr(node).endswith("Node(next=...)")


def test_nothing_is_compiled_before_the_first_instance() -> None:
    @module.dataclass(frozen=True, slots=True)
    class Late:
        a: int

    def compiled() -> list[str]:
        return [
            name
            for name, each in vars(Late).items()
            if inspect.isfunction(each) and each.__code__.co_filename == "<string>"
        ]

    assert compiled() == []
    assert Late(1).a == 1
    assert compiled() == ["__init__"]


def test_threads_may_make_the_first_instances_at_once() -> None:
    @module.dataclass(frozen=True, slots=True)
    class Shared:
        a: int

    together, made = threading.Barrier(8), []

    def make(number: int) -> None:
        together.wait()
        made.append(Shared(number).a)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(8))
