"""The interrupts of the other tests hit every place."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.tracing import interrupted_everywhere


def test_interrupts_hit_before_and_after_all_that_is_done() -> None:
    done: list[str] = []

    class Noted:
        def __init__(self) -> None:
            done.append("made")

        def __enter__(self) -> None:
            done.append("entered")

        def __exit__(self, *_: object) -> None:
            done.append("left")

    def numbers() -> Iterator[int]:
        for n in range(3):
            done.append(f"number {n}")
            yield n

    def run(_: int) -> None:
        done.clear()
        try:
            with Noted():
                for n in numbers():
                    done.append(f"got {n}")
                raise ValueError
        except ValueError:
            done.append("caught")

    seen = {tuple(done) for _ in interrupted_everywhere(run)}
    whole = max(seen, key=len)
    *body, left, caught = whole
    assert (left, caught) == ("left", "caught")
    inside = {(*body[:n], left) for n in range(2, len(body) + 1)}
    # Also as `with` begins and, for the error, ends: then it is not left.
    expected = {(), ("made",), ("made", "entered"), *inside, tuple(body), whole}
    assert expected <= seen, expected - seen
