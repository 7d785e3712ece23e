"""The operations of a session on its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import require_limit, require_one_of, require_text, require_whole, shown
from ..errors import InvalidArgument
from ..feed import emit
from ..kernel.operation import (
    C,
    Op,
    deciding,
    large_query,
    one,
    operation,
    query,
    rows,
    whole_query,
)
from ..records import KINDS, Checkpoint, Kind, LoadedCheckpoint, ResumePoint
from ..sessions.handle import SessionHandle
from . import read
from .changes import ChannelChange, Comparison, Extend, Grown, Head, Heads, SetList, SetValue
from .diff import Diff, compare
from .keys import VERSIONS
from .lines import RUN_ITEMS, Entry, Ref, list_header, manifest_of
from .read import find, header, listed, naming, require_session, spans
from .write import id_of_item, write

HISTORY_MAX = 10_000
REASON_CHARACTERS_MAX = 1_000

COUNT_KINDS = """
SELECT kind, count(*) AS checkpoints FROM (
    SELECT kind FROM hf_checkpoints WHERE key > :low AND key <= :high
    ORDER BY key DESC LIMIT :limit
) AS counted GROUP BY kind
"""
SET_PIN = """
INSERT INTO hf_pins (key, reason, created_at) VALUES (:key, :reason, :now)
ON CONFLICT (key) DO UPDATE SET reason = excluded.reason
"""
REMOVE_PIN = "DELETE FROM hf_pins WHERE key = :key"
ATTEST = "INSERT INTO hf_attestations (key, evidence, created_at) VALUES (:key, :evidence, :now)"


class CheckpointOps(SessionHandle[C]):
    """The operations of a session on its checkpoints."""

    @deciding
    def save(
        self,
        channels: Mapping[str, Any] | None = None,
        /,
        *,
        kind: Kind = "turn",
        data: Any = None,
        item: object = None,
        metadata: dict[str, Any] | None = None,
        expected_version: int | None = None,
        key: str | None = None,
        **named: Any,
    ) -> Op[Checkpoint]:
        """Save channels as the next version; those not named carry over. A full list costs only
        its change. A repeated `key` returns the first checkpoint and adds nothing. Raises
        VersionConflict, SessionBusy, LeaseLost or SessionEnded.
        """
        if channels is not None and not isinstance(channels, Mapping):
            raise InvalidArgument(f"channels must be a dict, not {type(channels).__name__}")
        head = Heads.of(self.runtime).get(self.number)
        wanted = {**(channels or {}), **named}
        changes = {name: self._set(head, name, value) for name, value in wanted.items()}
        given = (data, metadata, item, expected_version, key)
        return (yield from write(self.runtime, self._place, kind, changes, *given))

    @deciding
    def append(
        self,
        channel: str,
        items: Sequence[Any],
        *,
        kind: Kind = "turn",
        data: Any = None,
        item: object = None,
        metadata: dict[str, Any] | None = None,
        expected_version: int | None = None,
        key: str | None = None,
    ) -> Op[Checkpoint]:
        """Append items to a list channel as the next version; the list's length does not matter.

        A repeated `key` returns the first checkpoint and adds nothing.
        """
        require_text("channel", channel)
        if not isinstance(items, list):
            raise InvalidArgument(
                f"append takes a list of items, not {type(items).__name__}; wrap a single one: "
                f"append({shown(channel)}, [item])"
            )
        changes = {channel: Extend(self.runtime.codec.encode_each(items, name=channel))}
        given = (data, metadata, item, expected_version, key)
        return (yield from write(self.runtime, self._place, kind, changes, *given))

    @deciding
    def record(
        self,
        kind: Kind,
        data: Any = None,
        *,
        item: object = None,
        metadata: dict[str, Any] | None = None,
        expected_version: int | None = None,
        key: str | None = None,
    ) -> Op[Checkpoint]:
        """Write evidence as the next version: `data`, with the channels unchanged.

        A repeated `key` returns the first checkpoint and adds nothing.
        """
        given = (data, metadata, item, expected_version, key)
        return (yield from write(self.runtime, self._place, kind, {}, *given))

    @large_query
    def latest(
        self, *, kind: Kind | None = None, last: int | None = None
    ) -> Op[LoadedCheckpoint | None]:
        """Return the newest version on the path, or the newest of a kind; None if there is none."""
        require_kind(kind)
        if last is not None:
            require_whole("last", last, 1)
        if kind is None and (row := (yield from one(read.READ_NEWEST, number=self.number))):
            return (yield from read.load(self.runtime.codec, self.id, row, last))
        where = yield from spans(self.number, on_path=True)
        found = yield from listed(where, kind, None, 1)
        if not found:
            yield from require_session(self.number, self.id)
            return None
        return (yield from self._load(found[0]["key"] % VERSIONS, last))

    @large_query
    def at(self, version: int, *, last: int | None = None) -> Op[LoadedCheckpoint]:
        """Return a version with its channels, or raise CheckpointNotFound."""
        require_version(version)
        if last is not None:
            require_whole("last", last, 1)
        return (yield from self._load(version, last))

    @large_query
    def diff(self, before: int, after: int) -> Op[Diff]:
        """Compare the channels of two versions, at the cost of what differs between them."""
        require_version(before)
        require_version(after)
        old = yield from self._manifest(before)
        new = yield from self._manifest(after)
        with naming(self.id, after):
            delta = yield from read.read_delta(self.runtime.codec, old, new)
        return compare(delta.before, delta.after, delta.shared)

    @query
    def history(
        self,
        *,
        kind: Kind | None = None,
        item: object = None,
        before: int | None = None,
        after: int = 0,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> Op[list[Checkpoint]]:
        """Return versions without their channels, newest first, those of origins included.

        `before` and `after` are exclusive bounds.
        """
        require_kind(kind)
        require_limit(limit, HISTORY_MAX)
        if before is not None:
            require_version(before)
        if after != 0:
            require_version(after)
        where = yield from spans(self.number, on_path=False)
        bounds: dict[str, Any] = {"before": before, "after": after, "oldest_first": oldest_first}
        found = yield from listed(where, kind, id_of_item(item), limit, **bounds)
        if not found:
            yield from require_session(self.number, self.id)
        return [header(self.runtime.codec, self.id, row) for row in found]

    @whole_query
    def counts(self, *, at_most: int | None = None) -> Op[dict[str, int]]:
        """Return how many checkpoints the session has of each kind; it reads every one of them.

        With `at_most`, only that many of the newest are counted, at a bounded cost.
        """
        limit = VERSIONS if at_most is None else require_whole("at_most", at_most, 1, VERSIONS)
        low = self.number * VERSIONS
        found = yield from rows(COUNT_KINDS, low=low, high=low + VERSIONS - 1, limit=limit)
        if not found:
            yield from require_session(self.number, self.id)
        return {row["kind"]: int(row["checkpoints"]) for row in found}

    @query
    def resume_point(self) -> Op[ResumePoint]:
        """Return the iteration to run next and the checkpoint that says so; (1, None) at first."""
        row = yield from read.resume_row(self.number)
        if row is None:
            yield from require_session(self.number, self.id)
            return ResumePoint(iteration=1, checkpoint=None)
        step = 1 if row["kind"] == "iteration_end" else 0
        checkpoint = header(self.runtime.codec, self.id, row)
        return ResumePoint(iteration=row["iteration"] + step, checkpoint=checkpoint)

    @operation
    def pin(self, version: int, reason: str) -> Op[None]:
        """Keep a version from being pruned; a second pin replaces the reason."""
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidArgument("a pin needs a reason")
        if len(reason) > REASON_CHARACTERS_MAX or not reason.isprintable():
            raise InvalidArgument(
                f"a pin's reason is at most {REASON_CHARACTERS_MAX} printable characters"
            )
        key = yield from self._own_key(version)
        sealed = self.runtime.codec.pack(reason, context=("hf_pins", str(key)))
        yield from rows(SET_PIN, key=key, reason=sealed)
        yield from self._emit("checkpoint_pinned", version=version, reason=reason)

    @operation
    def unpin(self, version: int) -> Op[None]:
        """Let a version be pruned again."""
        key = yield from self._own_key(version)
        yield from rows(REMOVE_PIN, key=key)
        yield from self._emit("checkpoint_unpinned", version=version)

    @operation
    def attest(self, version: int, evidence: Any) -> Op[None]:
        """Record that a version was verified, and how; empty evidence is refused."""
        if not evidence:
            raise InvalidArgument("evidence is empty, so it attests nothing")
        body = self.runtime.codec.encode(evidence, name="evidence")
        key = yield from self._own_key(version)
        sealed = self.runtime.codec.seal(body, context=("hf_attestations", str(key)))
        yield from rows(ATTEST, key=key, evidence=sealed)
        yield from self._emit("checkpoint_attested", version=version)

    def _emit(self, kind: str, **data: Any) -> Op[None]:
        yield from emit(self.runtime.codec, self.root_id, self.id, kind, data)

    def _load(self, version: int, last: int | None) -> Op[LoadedCheckpoint]:
        row = yield from find(self.number, self.id, version)
        return (yield from read.load(self.runtime.codec, self.id, row, last))

    def _manifest(self, version: int) -> Op[dict[str, Entry]]:
        row = yield from find(self.number, self.id, version)
        with naming(self.id, version):
            return manifest_of(self.runtime.codec, row)

    def _own_key(self, version: int) -> Op[int]:
        """Lock the tree and return the key of one of the session's own versions."""
        require_version(version)
        yield from self._lock()
        key = self.number * VERSIONS + version
        if (yield from find(self.number, self.id, version))["key"] != key:
            raise InvalidArgument(
                f"version {version} belongs to the session that this one was forked from"
            )
        return key

    def _set(self, head: Head | None, channel: str, value: Any) -> ChannelChange:
        """Encode a channel; a list that only grew since the known head becomes an append."""
        require_text("channel", channel)
        codec = self.runtime.codec
        if type(value) is not list:
            return SetValue(codec.encode(value, name=channel))
        grown = None if head is None else self._growth(head, channel, value)
        return grown or SetList(codec.encode_each(value, name=channel))

    def _growth(self, head: Head, channel: str, value: list[Any]) -> ChannelChange | None:
        """Return how a list grew since a head, by comparing bytes; None if it did not."""
        codec = self.runtime.codec
        known, entry = head.lists.get(channel), head.manifest.get(channel)
        if known is None or not isinstance(entry, Ref) or len(value) < entry.length:
            return None
        comparison = Comparison(known)
        if not comparison.is_possible:
            return None
        buffer = bytearray()
        # One run at a time, so that encoded bytes are compared while in the CPU cache.
        for start in range(0, entry.length, RUN_ITEMS):
            run = value[start : min(start + RUN_ITEMS, entry.length)]
            # A tuple would encode like a list, but is refused as everywhere.
            codec.check_each(run, channel, start)
            if not codec.encode_into(run, buffer):
                return None
            with memoryview(buffer)[len(list_header(len(run))) :] as items:
                if not comparison.add(items):
                    return None
        if not comparison.is_equal():
            return None
        new = codec.encode_each(value[entry.length :], name=channel)
        return Grown(head.id, new, entry, comparison.joined, comparison.joined_bytes)


def require_kind(kind: object) -> None:
    """Refuse an unknown kind; None means any."""
    if kind is not None:
        require_one_of("kind", kind, KINDS)


def require_version(version: object) -> None:
    """Refuse an invalid version."""
    require_whole("version", version, 1, VERSIONS - 1)
