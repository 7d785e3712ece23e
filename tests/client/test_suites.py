"""Suites that run on a client in the long target are such that they can."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = sorted(path.stem for path in HERE.glob("test_*.py") if path != Path(__file__))


@pytest.mark.parametrize("name", MODULES)
def test_no_test_of_a_suite_opens_the_database_itself(name: str) -> None:
    module = importlib.import_module(f"tests.client.{name}")
    opening = [
        each
        for each, function in vars(module).items()
        if each.startswith("test_")
        and inspect.isfunction(function)
        and function.__module__ != module.__name__
        and "place" in inspect.signature(function).parameters
        and "**place" in inspect.getsource(function)
    ]
    assert opening == [] or hasattr(module, "place"), "leave them out, with the reason"
