"""Takes the pictures of the dashboard for the docs: `make pictures`.

Clock and data are fixed, so that a picture changes only with its page.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import holdfast
from holdfast.cli.demo.newsletter import EXPLORED
from holdfast.cli.demo.scene import REPORT, furnish
from holdfast.server.serve import Address
from tests.server.live import live
from tests.ui.browsers import looking, sign_in, started

PLACE = Path(__file__).parents[2] / "docs" / "pictures"
SIZE: Any = {"width": 1200, "height": 760}
PAGES = {
    "dashboard": "/ui/",
    "dashboard-transcript": f"/ui/sessions/{REPORT}-gauges/transcript",
    "dashboard-checkpoints": f"/ui/sessions/{REPORT}-draft/checkpoints",
    "dashboard-timeline": f"/ui/sessions/{REPORT}/timeline?at=30&until=48",
    "dashboard-in-doubt": "/ui/in-doubt",
    "dashboard-exploration": f"/ui/explorations/{EXPLORED}",
}
# It is shown in commands.
PORT = 8317
DARK = {"dashboard-checkpoints"}


def take(place: Path, pages: dict[str, str], size: Any = SIZE, *, is_dark: bool = False) -> None:
    """Take a picture of each page, by the name of its file."""
    clock = holdfast.VirtualClock()
    with tempfile.TemporaryDirectory() as directory, started() as browser:
        store: dict[str, Any] = {"url": f"sqlite:///{directory}/demo.db", "clock": clock}
        with holdfast.open(**store) as opened:
            furnish(opened, clock.advance)
            clock.advance(90)
        with (
            live(address=Address(port=PORT), **store) as server,
            looking(browser, server.url, viewport=size, timezone_id="UTC") as page,
        ):
            sign_in(page, server.url, server.secret)
            for name, path in pages.items():
                page.emulate_media(color_scheme="dark" if is_dark or name in DARK else "light")
                page.goto(path)
                if page.locator("html[data-live], html[data-poll]").count():
                    page.locator("#live").filter(has_text="Live").wait_for()
                page.screenshot(path=place / f"{name}.png", animations="disabled")


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(PAGES)
    take(PLACE, {name: PAGES[name] for name in wanted})
