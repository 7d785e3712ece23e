"""JSON schemas from type hints, and arguments that do not fit."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Required, TypedDict, Union

import msgspec
import pytest

import holdfast
from holdfast.agent import Agent, ScriptedModel, call
from holdfast.effects.tools import parameters_of, plain_arguments, tool, typed_arguments
from holdfast.errors import InvalidArgument, InvalidValue
from holdfast.testing.subject import Subject, done
from tests.agent.helpers import run
from tests.checkpoints.colours import both_colours


@dataclass
class Address:
    """Where somebody lives."""

    street: str
    number: int = 1


class Options(TypedDict, total=False):
    fast: Required[bool]
    note: str


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Opaque:
    pass


def book(  # type: ignore[no-untyped-def]
    city: str,
    nights: int,
    *,
    price: float = 1.5,
    tags: list[str] | None = None,
    room: Literal["single", "double"] = "single",
    address: Optional[Address] = None,  # noqa: UP045
    options: Options = {"fast": True},  # noqa: B006
    seat: Union[int, str] = 3,  # noqa: UP007
    colour: Colour = Colour.RED,
    on: datetime.date | None = None,
    flags: dict[str, bool] = {},  # noqa: B006
    is_sure: bool = False,
    stars: Annotated[int, msgspec.Meta(ge=1, le=5, description="How good.")] = 3,
    nothing: None = None,
    anything=None,
    idempotency_key: str,
) -> None:
    """Book a room.

    Args:
        city: Where to
            sleep.
        nights (int): How long: in nights.

    Returns:
        price: not a parameter
    """


def test_every_kind_of_hint_has_its_schema() -> None:
    schema = parameters_of(book)
    assert schema["type"] == "object"
    assert schema["required"] == ["city", "nights"]
    assert schema["additionalProperties"] is False
    text, whole = {"type": "string"}, {"type": "integer"}
    assert schema["properties"] == {
        "city": {**text, "description": "Where to sleep."},
        "nights": {**whole, "description": "How long: in nights."},
        "price": {"type": "number", "default": 1.5},
        "tags": {"anyOf": [{"type": "array", "items": text}, {"type": "null"}], "default": None},
        "room": {"enum": ["double", "single"], "default": "single"},
        "address": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}], "default": None},
        "options": {"$ref": "#/$defs/Options", "default": {"fast": True}},
        "seat": {"anyOf": [whole, text], "default": 3},
        "colour": {"$ref": "#/$defs/Colour"},
        "on": {"anyOf": [{**text, "format": "date"}, {"type": "null"}], "default": None},
        "flags": {
            "type": "object",
            "additionalProperties": {"type": "boolean"},
            "default": {},
        },
        "is_sure": {"type": "boolean", "default": False},
        "stars": {
            **whole,
            "minimum": 1,
            "maximum": 5,
            "description": "How good.",
            "default": 3,
        },
        "nothing": {"type": "null", "default": None},
        "anything": {"default": None},
    }
    assert schema["$defs"]["Address"]["properties"]["number"] == {**whole, "default": 1}
    assert schema["$defs"]["Options"]["required"] == ["fast"]
    assert schema["$defs"]["Colour"]["enum"] == ["blue", "red"]


def test_a_tool_has_its_functions_schema() -> None:
    made = tool(effect="read")(book)
    assert made.parameters == parameters_of(book)


def test_descriptions_in_the_way_of_sphinx_are_read_too() -> None:
    def look(city: str, depth: int = 1) -> None:
        """Look.

        :param city: where to look
        :param int depth: how deep
        """

    properties = parameters_of(look)["properties"]
    assert properties["city"]["description"] == "where to look"
    assert properties["depth"]["description"] == "how deep"


def test_arguments_become_one_plain_form() -> None:
    given = {
        "city": "Oslo",
        "nights": 2,
        "price": 5,
        "address": {"street": "x"},
        "on": "2026-01-02",
    }
    assert plain_arguments(book, given) == {**given, "price": 5.0}
    assert type(plain_arguments(book, given)["price"]) is float


def test_a_function_gets_what_its_hints_promise() -> None:
    given = {
        "city": "Oslo",
        "nights": 2**70,
        "address": {"street": "x"},
        "colour": "blue",
        "on": "2026-01-02",
        "anything": [{"deep": None}],
    }
    assert typed_arguments(book, given) == {
        **given,
        "address": Address("x"),
        "colour": Colour.BLUE,
        "on": datetime.date(2026, 1, 2),
    }


@pytest.mark.parametrize(
    ("given", "path", "says"),
    [
        ({}, "$", "missing required field `city`"),
        ({"city": 1, "nights": 1}, "$.city", "Expected `str`, got `int`"),
        ({"city": "x", "nights": "2"}, "$.nights", "Expected `int`, got `str`"),
        ({"city": "x", "nights": True}, "$.nights", "Expected `int`, got `bool`"),
        ({"city": "x", "nights": 1.5}, "$.nights", "Expected `int`, got `float`"),
        ({"city": "x", "nights": 1, "cost": 1}, "$", "unknown field `cost`"),
        ({"city": "x", "nights": 1, "room": "suite"}, "$.room", "Invalid enum value 'suite'"),
        ({"city": "x", "nights": 1, "stars": 9}, "$.stars", "<= 5"),
        ({"city": "x", "nights": 1, "address": {"street": 4}}, "$.address.street", "`str`"),
        ({"city": "x", "nights": 1, "tags": ["a", 2]}, "$.tags[1]", "Expected `str`"),
        ({"city": "x", "nights": 1, "idempotency_key": "k"}, "$", "unknown field"),
        (["Oslo"], "$", "must be a JSON object, not list"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(given: Any, path: str, says: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        plain_arguments(book, given)
    assert says in str(raised.value)
    assert raised.value.path == path


def test_a_function_that_takes_anything_gets_it() -> None:
    def loose(a: int, **rest: Any) -> None: ...

    assert "additionalProperties" not in parameters_of(loose)
    assert plain_arguments(loose, {"a": 1, "b": [2]}) == {"a": 1, "b": [2]}
    assert typed_arguments(loose, {"a": 1, "b": [2]}) == {"a": 1, "b": [2]}


def test_a_hint_that_json_cannot_say_is_named() -> None:
    def odd(a: int, thing: Opaque) -> None: ...

    with pytest.raises(InvalidArgument, match="tool odd: parameter 'thing' cannot be described"):
        parameters_of(odd)


def test_a_hint_that_is_defined_nowhere_is_named() -> None:
    def lost(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidArgument, match="'Nowhere' is not defined"):
        parameters_of(lost)


@both_colours
async def test_an_agents_tool_gets_dataclasses_and_the_ledger_plain_data(subject: Subject) -> None:
    got: list[Any] = []

    @tool(effect="mutate")
    def move(address: Address, colour: Colour = Colour.RED, *, idempotency_key: str) -> str:
        got.append((address, colour, bool(idempotency_key)))
        return "moved"

    store = await subject.open()
    session = await done(store.session())
    plain = {"address": {"street": "x"}, "colour": "blue"}
    model = ScriptedModel([call("move", **plain), call("move", address=7), "ok"])
    await run(Agent(session, model, tools=[move]), "go")
    assert got == [(Address("x"), Colour.BLUE, True)]
    (effect,) = await done(store.effects(session=session.id))
    assert effect.arguments == plain


def test_an_agent_refuses_a_tool_that_no_model_can_be_shown() -> None:
    @tool(effect="read")
    def odd(thing: Opaque) -> None: ...

    with (
        holdfast.open("sqlite://") as store,
        pytest.raises(InvalidArgument, match="parameter 'thing' cannot be described"),
    ):
        Agent(store.session(), ScriptedModel(["hi"]), tools=[odd])
