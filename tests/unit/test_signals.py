"""A ring is never lost, and what is remembered of rings stays small."""

from __future__ import annotations

import sys

from holdfast.kernel.signals import TOPICS_MAX, Signals


def test_a_ring_after_the_count_is_seen_and_that_of_another_topic_is_not() -> None:
    signals = Signals()
    signals.ring("a")
    seen_a, seen_b = signals.count("a"), signals.count("b")
    signals.ring("a")
    assert signals.wait("a", seen_a, 0)
    assert not signals.wait("b", seen_b, 0)
    assert not signals.wait("a", signals.count("a"), 0)


def test_a_ring_of_all_topics_is_one_of_each() -> None:
    signals = Signals()
    signals.ring("known")
    seen = {topic: signals.count(topic) for topic in ("known", "new")}
    signals.ring_here(None)
    assert all(signals.wait(topic, count, 0) for topic, count in seen.items())


def test_topics_that_are_rung_once_do_not_fill_the_memory() -> None:
    signals = Signals()
    for number in range(5 * TOPICS_MAX):
        signals.ring(f"effect:{number}")
    assert sys.getsizeof(signals._last) < 200 * TOPICS_MAX


def test_no_ring_is_lost_however_many_topics_are_rung_behind_it() -> None:
    signals = Signals()
    for others in (0, 1, TOPICS_MAX - 1, TOPICS_MAX, 3 * TOPICS_MAX):
        seen = signals.count("topic")
        signals.ring("topic")
        for number in range(others):
            signals.ring(f"other:{others}:{number}")
        assert signals.wait("topic", seen, 0)
