"""A Redis database. The server reports which keys change; only those are read and written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ...arguments import shown
from ...errors import Conflict, InvalidArgument
from ...extras import required
from ..system import Observation, System
from ..tree import Changes, DeltaTree

with required("RedisSystem", "worlds"):
    import redis
    from redis.exceptions import ConnectionError as Disconnected
    from redis.exceptions import ResponseError

_BATCH: Final = 500
# Redis 6 lacks PEXPIRETIME, so expiry times are known only to a millisecond or two.
_JITTER_MS: Final = 2
# One script for all keys, so that keys and time are read at the same moment.
_READ: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {now}
for _, key in ipairs(KEYS) do
    local left = redis.call('PTTL', key)
    found[#found + 1] = redis.call('DUMP', key)
    found[#found + 1] = left
end
return found
"""


class _Value(NamedTuple):
    """The dump of a key, and the time at which it expires, in milliseconds."""

    dump: bytes
    expires_at: int | None

    def is_same(self, other: _Value | None) -> bool:
        if other is None or self.dump != other.dump:
            return False
        if self.expires_at is None or other.expires_at is None:
            return self.expires_at is other.expires_at
        return abs(self.expires_at - other.expires_at) <= _JITTER_MS


class RedisSystem(System):
    """The keys of one database that begin with a prefix; a checkpoint costs the keys that changed.

    If the server does not report changes, each checkpoint and rollback reads every key, and a
    warning says so.

    Keys keep their expiry time: one that has expired in the meantime is not restored.
    `observe` is a function of a client that returns what a state shows; by default it is the
    content of all keys, without their expiry.
    """

    not_covered = (
        "SWAPDB, which the server does not report",
        "functions, scripts, publish and subscribe, access lists, and the configuration",
        "clusters",
        "moments of expiry on Redis 6: they are exact to 2 ms",
    )

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "",
        observe: Callable[[redis.Redis], object] | None = None,
    ) -> None:
        if not isinstance(prefix, str):
            raise InvalidArgument(f"prefix must be text, not {shown(prefix)}")
        self._prefix = prefix.encode()
        self._observe = observe
        self._client = redis.Redis.from_url(url, protocol=3, decode_responses=False)
        self._tracker: Any = None
        self._is_reporting = True
        self._reported: set[bytes] = set()
        self._is_complete = False
        # The value of each key at the head of the tree, and the dump that it has now.
        self._values: dict[bytes, _Value] = {}
        self._restored: dict[bytes, tuple[_Value, _Value]] = {}
        self._shown: dict[bytes, Any] = {}
        self._unseen: set[bytes] = set()
        self._fading: set[bytes] = set()
        self._tree = DeltaTree()
        try:
            self._client.ping()
            self._read = self._client.register_script(_READ)
            self._note(self._pending())
            self._try_out()
        except BaseException:
            self.close()
            raise

    def checkpoint(self, name: str) -> int:
        """Store the keys that changed since the last checkpoint or rollback."""
        pending = self._pending()
        token = self._tree.add(pending)
        self._note(pending)
        return token

    def prepare(self, token: int) -> None:
        """Raise unless the token is known and the server responds."""
        self._tree.find(token)
        self._client.ping()

    def rollback(self, token: int) -> None:
        """Write the keys that differ, in one transaction."""
        target = self._tree.find(token)
        pending = self._pending()
        changes = self._tree.changes_to(target, pending)
        self._restore(changes)
        self._note_restored(pending, changes)
        self._tree.move(target)

    def release(self, token: int) -> None:
        """Forget a checkpoint."""
        self._tree.release(token)

    def keep(self, token: int) -> object:
        """Return every key with its dump and its expiry."""
        return {key: tuple(value) for key, value in self._values.items()}

    def restore(self, kept: dict[bytes, tuple[bytes, int | None]]) -> None:
        """Write the keys that differ from what a dead process has kept."""
        pending = self._pending()
        now = dict(self._values)
        now |= {key: value for key, (_, value) in pending.items()}
        wanted = {key: _Value(*value) for key, value in kept.items()}
        changes: Changes = {
            key: (now.get(key), wanted.get(key))
            for key in now.keys() | wanted.keys()
            if now.get(key) != wanted.get(key)
        }
        self._restore(changes)
        self._note_restored(pending, changes)
        self._tree.leave(self._tree.fold(pending, changes))

    def observe(self) -> object:
        """Return what the observer reads; by default the content of every key, by its type."""
        if self._observe is not None:
            return self._observe(self._client)
        self._collect()
        # An expired key is reported only when the server notices it.
        keys = sorted(self._unseen | self._fading)
        for key, (value, is_fading) in zip(keys, _contents(self._client, keys), strict=True):
            self._shown.pop(key, None)
            if value is not None:
                self._shown[key] = value
            (self._fading.add if is_fading else self._fading.discard)(key)
        # Last, so that after a failure or an interrupt these keys are read again.
        self._unseen.difference_update(keys)
        return Observation("redis", dict(self._shown), {"expiring": len(self._fading)})

    def close(self) -> None:
        """Close the connections; the keys are left as they are."""
        if self._tracker is not None:
            self._tracker.disconnect()
        self._client.close()

    def _collect(self) -> None:
        """Collect the keys that may have changed: those that were reported, or all."""
        if self._is_reporting:
            try:
                self._listen()
            except ResponseError as error:
                self._distrust(f"the server refuses to report changes: {error}")
        if not self._is_complete:
            self._is_complete = self._is_reporting
            found = self._client.scan_iter(match=_pattern(self._prefix), count=1_000)
            self._reported.update(found)
            self._reported.update(self._values)
        self._unseen |= self._reported

    def _listen(self) -> None:
        """Receive reports; everything written so far has been reported."""
        try:
            tracker = self._tracker or self._track()
            tracker.send_command("PING")
            tracker.read_response()
        except Disconnected:
            # The reports to the lost connection are lost.
            self._track()

    def _distrust(self, reason: str) -> None:
        """Read every key from now on."""
        self._is_reporting = self._is_complete = False
        warnings.warn(
            f"Redis: {reason}; each checkpoint and rollback reads every key.", stacklevel=2
        )

    def _track(self) -> Any:
        tracker: Any = self._client.connection_pool.make_connection()
        tracker.connect()
        tracker._parser.set_invalidation_push_handler(self._hear)
        options = ("PREFIX", self._prefix) if self._prefix else ()
        tracker.send_command("CLIENT", "TRACKING", "ON", "BCAST", *options)
        tracker.read_response()
        self._tracker, self._is_complete = tracker, False
        return tracker

    def _hear(self, message: Sequence[Any]) -> None:
        keys = message[1]
        if keys is None:
            self._is_complete = False
        else:
            self._reported.update(bytes(key) for key in keys)

    def _pending(self) -> Changes:
        """Return what changed since the head."""
        self._collect()
        changes: Changes = {}
        for key, value in self._read_all(sorted(self._reported | self._expiring())):
            before, after = self._values.get(key), self._known(key, value)
            if before != after:
                changes[key] = before, after
        return changes

    def _read_all(self, keys: list[bytes]) -> Iterator[tuple[bytes, _Value | None]]:
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            now_ms, *found = self._read(keys=batch)
            for key, dump, left in zip(batch, found[::2], found[1::2], strict=True):
                expires_at = None if left < 0 else now_ms + left
                yield key, None if dump is None else _Value(dump, expires_at)

    def _expiring(self) -> set[bytes]:
        return {key for key, value in self._values.items() if value.expires_at is not None}

    def _known(self, key: bytes, value: _Value | None) -> _Value | None:
        """Return the original value of a restored key, whose dump may have different bytes."""
        if value is None:
            return None
        meant, dumped = self._restored.get(key, (None, None))
        if meant is not None and value.is_same(dumped):
            return meant
        before = self._values.get(key)
        return before if value.is_same(before) else value

    def _note(self, changes: Changes) -> None:
        for key, (_, value) in changes.items():
            self._restored.pop(key, None)
            self._values.pop(key, None)
            if value is not None:
                self._values[key] = value
        self._reported.clear()

    def _note_restored(self, pending: Changes, changes: Changes) -> None:
        self._note(pending)
        self._note(changes)
        self._remember_dumps(changes)

    def _restore(self, changes: Changes) -> None:
        with self._client.pipeline(transaction=True) as pipe:
            for key, (_, wanted) in changes.items():
                if wanted is None:
                    pipe.delete(key)
                else:
                    expiry = wanted.expires_at or 0
                    pipe.restore(key, expiry, wanted.dump, replace=True, absttl=bool(expiry))
            pipe.execute()

    def _remember_dumps(self, changes: Changes) -> None:
        keys = [key for key, (_, wanted) in changes.items() if wanted is not None]
        for key, dumped in self._read_all(keys):
            if dumped is not None:
                self._restored[key] = self._values[key], dumped

    def _try_out(self) -> None:
        """Write, change and restore a scratch key, in the same way as the others."""
        key = self._prefix + b"holdfast world trial"
        before = self.checkpoint("before the trial")
        try:
            self._client.set(key, b"1", px=60_000)
            if key not in self._pending():
                self._distrust("the server does not report which keys change")
            self.rollback(before)
            if self._client.exists(key):
                raise Conflict("a self-test of restoring a key gave a different result")
        finally:
            self._client.delete(key)
            self.release(before)


def _pattern(prefix: bytes) -> bytes:
    """Return the prefix as a pattern for SCAN."""
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^" else bytes([c]) for c in prefix) + b"*"


def _contents(client: redis.Redis, keys: list[bytes]) -> list[tuple[Any, bool]]:
    """Return the content of each key, however it is encoded, and whether it will expire."""
    if not keys:
        return []
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.type(key)
        kinds: list[bytes] = pipe.execute()
        for key, kind in zip(keys, kinds, strict=True):
            _READERS.get(kind, _dump)(pipe, key)
            pipe.pttl(key)
        found: list[Any] = pipe.execute()
    return [
        (None if kind == b"none" else [kind, _plain(kind, value)], left >= 0)
        for kind, value, left in zip(kinds, found[::2], found[1::2], strict=True)
    ]


def _dump(pipe: Any, key: bytes) -> None:
    pipe.dump(key)


_READERS: Final[dict[bytes, Callable[[Any, bytes], object]]] = {
    b"string": lambda pipe, key: pipe.get(key),
    b"list": lambda pipe, key: pipe.lrange(key, 0, -1),
    b"hash": lambda pipe, key: pipe.hgetall(key),
    b"set": lambda pipe, key: pipe.smembers(key),
    b"zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
    b"stream": lambda pipe, key: pipe.xrange(key),
}


def _plain(kind: bytes, value: Any) -> object:
    if kind == b"set":
        return set(value)
    if kind in (b"zset", b"stream"):
        return [list(pair) for pair in value]
    return value
