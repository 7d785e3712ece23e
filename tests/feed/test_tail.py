"""What followers of one feed share: the pages that were read, and who reads next."""

from __future__ import annotations

import time

from holdfast.feed.follow import PAGE_SECONDS_MAX, READ_SECONDS_MAX, Page, Tail, page_of


def page(first: int, last: int) -> Page[int, int]:
    """Events that are their own positions."""
    return page_of(list(range(first, last + 1)), lambda event: event, first - 1)


def test_who_is_inside_a_page_gets_the_rest_of_it() -> None:
    tail: Tail[int, int] = Tail()
    tail.put(0, page(1, 3), ring=0)
    tail.put(3, page(4, 9), ring=0)
    rests = {after: tail.page(after, 0.0) for after in range(11)}
    found = {after: list(rest.events) for after, rest in rests.items() if rest is not None}
    assert found == {
        0: [1, 2, 3], 1: [2, 3], 2: [3],
        3: [4, 5, 6, 7, 8, 9], 4: [5, 6, 7, 8, 9], 5: [6, 7, 8, 9], 6: [7, 8, 9], 7: [8, 9], 8: [9],
    }  # fmt: skip
    assert {rest.after for rest in rests.values() if rest is not None} == {3, 9}


def test_a_page_counts_only_if_it_is_recent_and_was_read_since() -> None:
    tail: Tail[int, int] = Tail()
    now = time.monotonic()
    tail.put(0, page(1, 3), ring=0)
    assert tail.page(0, now) is not None
    assert tail.page(1, now) is not None
    assert tail.page(0, time.monotonic() + 1) is None
    assert tail.page(1, time.monotonic() + 1) is None
    tail.put(0, Page([1], 1, is_end=True, read_at=now - PAGE_SECONDS_MAX - 1), ring=0)
    assert tail.page(0, 0.0) is None


def test_the_end_counts_only_if_it_was_read_after_the_ring_and_recently() -> None:
    tail: Tail[int, int] = Tail()
    tail.put(3, page_of([], int, 3), ring=7)
    assert tail.is_read(3, 7, 0.0)
    assert not tail.is_read(2, 7, 0.0)
    assert not tail.is_read(3, 8, 0.0)
    assert not tail.is_read(3, 7, time.monotonic() + 1)


def test_a_read_that_began_earlier_does_not_hide_what_a_later_one_found() -> None:
    tail: Tail[int, int] = Tail()
    tail.put(10, page(11, 15), ring=8)
    tail.put(12, page(13, 14), ring=7)
    assert tail.is_read(15, 8, 0.0)
    assert not tail.is_read(14, 8, 0.0)


def test_at_each_place_one_follower_reads() -> None:
    tail: Tail[int, int] = Tail()
    one, other = object(), object()
    assert [tail.may_read(5, one), tail.may_read(5, other), tail.may_read(6, other)] == [
        True, False, True,
    ]  # fmt: skip
    tail.put(5, page(6, 7), ring=0)
    assert [tail.may_read(5, one), tail.may_read(6, one)] == [True, False]
    assert tail.leave(other)
    assert [tail.may_read(5, other), tail.may_read(6, one)] == [False, True]
    # One that takes too long does not keep the others from reading.
    _, since = tail._reading[6]
    tail._reading[6] = (one, since - 2 * READ_SECONDS_MAX)
    assert tail.may_read(6, other)


def test_one_follower_waits_for_all_that_look_no_more_often() -> None:
    tail: Tail[int, int] = Tail()
    one, other, eager = object(), object(), object()
    assert [tail.may_wait(one, 5.0), tail.may_wait(other, 5.0), tail.may_wait(one, 5.0)] == [
        True, False, True,
    ]  # fmt: skip
    assert not tail.leave(other)
    assert not tail.may_wait(other, 5.0)
    assert tail.may_wait(eager, 1.0)
    assert [tail.may_wait(one, 5.0), tail.leave(one)] == [False, False]
    assert tail.leave(eager)
    assert not tail.leave(eager)
    assert tail.may_wait(other, 5.0)
