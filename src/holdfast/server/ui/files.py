"""The static files of pages; their address changes with their content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..endpoints import PAGES, Endpoints, Handler
from ..messages import Answer, Call

TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
KEEP = "public, max-age=31536000, immutable"


class Files:
    """The contents of a folder, under one hash, so that modules import each other by name."""

    def __init__(self, folder: Path) -> None:
        found = sorted(each for each in folder.iterdir() if each.suffix in TYPES)
        self.contents = {each.name: each.read_bytes() for each in found}
        parts = [name.encode() + b"\0" + content for name, content in self.contents.items()]
        self.hash = hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]

    def place(self, name: str) -> str:
        """Return the address of a file, without the base path."""
        assert name in self.contents, name
        return f"{PAGES}static/{self.hash}/{name}"

    def routes(self) -> Endpoints:
        """Return a route for each file; they hold no data and need no token."""
        routes = Endpoints()
        for name, content in self.contents.items():
            kind = f"{TYPES[Path(name).suffix]}; charset=utf-8"
            routes.add("GET", self.place(name), None, is_hidden=True)(_sending(content, kind))
        return routes


def _sending(content: bytes, kind: str) -> Handler:
    async def file(call: Call) -> Answer:
        headers = {"cache-control": KEEP, "x-content-type-options": "nosniff"}
        return Answer(200, content, headers, content_type=kind)

    return file


STATIC = Files(Path(__file__).with_name("static"))
routes = STATIC.routes()
