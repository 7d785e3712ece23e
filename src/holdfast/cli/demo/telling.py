"""How the processes that are killed speak: they tell what they do, and stand still to be killed."""

from __future__ import annotations

import json
import os
from typing import Literal, get_args

Point = Literal["before_intent", "after_intent", "after_effect", "after_result", "after_checkpoint"]
POINTS: tuple[Point, ...] = get_args(Point)


def tell(what: str, **fields: object) -> None:
    """Tell the demo something in one write, which arrives whole or not at all."""
    try:
        os.write(1, json.dumps({"what": what, **fields}).encode() + b"\n")
    except BrokenPipeError:
        # The demo is gone, and this process was there for it alone.
        os._exit(1)


class Stand:
    """Stops this process, whatever thread it is on, where it is to be killed."""

    def __init__(self, point: str) -> None:
        self._point = point

    def reach(self, point: Point) -> None:
        """Go on, or wait here for SIGKILL."""
        if point != self._point:
            return
        tell("reached", point=point)
        # Only the end of the demo itself ends this.
        os.read(0, 1)
        os._exit(1)
