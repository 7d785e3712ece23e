"""Converting plain data to the types that an interface takes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .problems import Refusal

_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")


def converted(value: Any, wanted: Any, *, strict: bool = True, whole: str = "the body") -> Any:
    """Convert plain data to the wanted type; on failure, the pointer names the offending part."""
    try:
        return msgspec.convert(value, wanted, strict=strict)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        pointer = "" if found is None else _pointer(found["path"])
        detail = text if found is None else text[: found.start()]
        raise Refusal("invalid_request", f"{pointer or whole}: {detail}", pointer=pointer) from None


def _pointer(path: str) -> str:
    """Return a JSON pointer for a path like `$.operations[0].key`."""
    return re.sub(r"\.|\[", "/", path.removeprefix("$")).replace("]", "")
