"""What the tools of these tests do, as somebody outside would count it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast
from holdfast import Unknown, VirtualClock
from holdfast.testing.subject import Subject, done


class World:
    """What tools do, as somebody outside would count it."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.keys: list[str] = []
        self.fails_with: BaseException | None = None
        self.inside: Callable[[], object] | None = None
        self.verdict: Any = Unknown()
        self.asked: list[tuple[dict[str, Any], str]] = []

    def act(self, what: Any, key: str = "") -> int:
        self.done.append(what)
        self.keys.append(key)
        if self.inside is not None:
            self.inside()
        if self.fails_with is not None:
            raise self.fails_with
        return len(self.done)

    def verify(self, arguments: dict[str, Any], idempotency_key: str) -> Any:
        self.asked.append((arguments, idempotency_key))
        return self.verdict

    def tool(self, **rules: Any) -> holdfast.Tool[..., Any]:
        def mail(to: str, text: str = "", *, idempotency_key: str) -> int:
            return self.act((to, text), idempotency_key)

        return holdfast.tool(**{"effect": "mutate", **rules})(mail)


async def abandoned(subject: Subject, tool: Any, **arguments: Any) -> tuple[Any, Any]:
    """Return a store with a session in which the owner of a call died before its outcome."""
    clock = VirtualClock()
    store = await subject.open(clock=clock)
    session = await done(store.session("s"))
    begun = await done(session.begin(tool, arguments))
    assert begun.idempotency_key
    clock.advance(3600)
    return store, session
