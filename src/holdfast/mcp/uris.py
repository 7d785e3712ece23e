"""The addresses of shared state: `state://{root}` and `state://{root}/{key}`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

SCHEME = "state://"
ROOT_TEMPLATE = "state://{root}"
KEY_TEMPLATE = "state://{root}/{+key}"
# What a key may hold unescaped; a template's {+key} leaves these alone.
_PLAIN = "/:@!$&'()*+,;="


@dataclass(frozen=True, slots=True)
class Address:
    """A tree, or one key of its state."""

    root_id: str
    key: str | None = None

    def __str__(self) -> str:
        root = f"{SCHEME}{quote(self.root_id, safe='')}"
        return root if self.key is None else f"{root}/{quote(self.key, safe=_PLAIN)}"


def parse_address(uri: str) -> Address | None:
    """Return what a URI names, or None if it is not one of ours."""
    if not uri.startswith(SCHEME):
        return None
    root, slash, key = uri.removeprefix(SCHEME).partition("/")
    try:
        root_id = unquote(root, errors="strict")
        return Address(root_id, unquote(key, errors="strict") if slash else None)
    except UnicodeDecodeError:
        return None
