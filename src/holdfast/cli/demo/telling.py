"""How the processes to be killed report what they do, and stop where they are to be killed."""

from __future__ import annotations

import json
import os
from typing import Literal, get_args

Point = Literal["before_intent", "after_intent", "after_effect", "after_result", "after_checkpoint"]
POINTS: tuple[Point, ...] = get_args(Point)


def tell(what: str, **fields: object) -> None:
    """Report something to the demo in one write, which arrives completely or not at all."""
    try:
        os.write(1, json.dumps({"what": what, **fields}).encode() + b"\n")
    except BrokenPipeError:
        # The demo has ended, and this process existed only for it.
        os._exit(1)


class Stand:
    """Stops this process, whatever thread it is on, where it is to be killed."""

    def __init__(self, point: str) -> None:
        self._point = point

    def reach(self, point: Point) -> None:
        """Continue, or wait here for SIGKILL."""
        if point != self._point:
            return
        tell("reached", point=point)
        # Only SIGKILL, or the end of the demo itself, ends this.
        os.read(0, 1)
        os._exit(1)
