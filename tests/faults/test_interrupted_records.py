"""Ctrl-C while the methods of a record are compiled, at its first use."""

from __future__ import annotations

from typing import Any

from holdfast.dataclass import dataclass
from tests.faults.tracing import interrupted_everywhere


def declare() -> Any:
    @dataclass(frozen=True, slots=True)
    class Record:
        """A record that was not used yet."""

        number: int
        text: str = "none"

    return Record


def test_a_record_interrupted_at_its_first_use_is_usable() -> None:
    """Whatever came out of the first use but KeyboardInterrupt would be raised here."""
    classes = [declare()]
    for _ in interrupted_everywhere(
        lambda _: classes[-1](1, text="x"), ("holdfast/dataclass.py", "/dataclasses.py")
    ):
        made = classes[-1](1, text="x")
        assert (made.number, made.text) == (1, "x")
        assert repr(made).endswith("Record(number=1, text='x')")
        classes.append(declare())
    assert len(classes) > 30
