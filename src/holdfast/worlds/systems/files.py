"""A directory tree. A checkpoint is a scan of it; contents are stored once, by their hash."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...arguments import require_path
from ...errors import InvalidArgument, NotFound, SystemBusy
from ..folders import PREFIX, OwnFolder, kept_folder, remove_kept, sweep_folders
from ..system import System
from ..tree import Changes, DeltaTree

_CHUNK_BYTES: Final = 1 << 20
# A file that changed this shortly before it was read may change again with the same times.
_TICK_NS: Final = 20_000_000
_READS_MAX: Final = 5
_KIND: Final = "files"
# Prefixes of files that a rollback has not renamed yet, and of a probe for the precision of times.
_TEMPORARY: Final = re.compile(re.escape(PREFIX) + "(?:[0-9a-f]{24}|probe)")


class _Entry(NamedTuple):
    """What a path holds: its kind, its permissions, and a file's hash or a link's target."""

    kind: str
    mode: int
    content: str = ""
    modified_ns: int = 0


_DIRECTORY: Final = _Entry("directory", 0)


class _Known(NamedTuple):
    """A file as it was hashed: its signature, which changes with it, and the time of the scan."""

    signature: tuple[int, ...]
    hashed_at_ns: int
    content: str


class FileSystem(System):
    """Files, directories and symbolic links below one directory, with modes and times of files.

    Nothing outside is touched. `observe` is a function of the path that returns what a state
    shows; by default it is every path with its kind, mode and hash or target.
    """

    not_covered = (
        "open descriptors, memory maps and locks",
        "owners, extended attributes, times of directories",
        "hard links: they become separate files",
        "sockets, pipes and devices",
    )

    def __init__(
        self, path: str | Path, *, observe: Callable[[Path], object] | None = None
    ) -> None:
        self.path = require_path(path, "a directory")
        _require_own(self.path)
        self._observe = observe
        self._folder = OwnFolder(_KIND)
        self._kept = self._folder.path
        self._stamp = self._kept / "stamp"
        self._known: dict[str, _Known] = {}
        self._tree = DeltaTree()
        self._trusts_times = self._has_fine_times()
        self._entries = self._scan()

    def checkpoint(self, name: str) -> int:
        """Scan the tree and store what changed since the last checkpoint or rollback."""
        now = self._scan()
        token = self._tree.add(self._pending(now))
        self._entries = now
        return token

    def prepare(self, token: int) -> None:
        """Raise unless the token is known and the directory still exists."""
        self._tree.find(token)
        self._require_there()

    def rollback(self, token: int) -> None:
        """Write what differs; each file is replaced atomically."""
        target = self._tree.find(token)
        now = self._scan()
        changes = self._tree.changes_to(target, self._pending(now))
        self._apply(changes)
        wanted = now | {path: entry for path, (_, entry) in changes.items()}
        self._entries = {path: entry for path, entry in wanted.items() if entry is not None}
        self._tree.move(target)

    def release(self, token: int) -> None:
        """Forget a checkpoint."""
        self._tree.release(token)

    def keep(self, token: int) -> object:
        """Return every path with what it holds; the contents stay in the system's folder."""
        self._folder.keep()
        entries = {path: tuple(entry) for path, entry in self._entries.items()}
        return {"folder": str(self._kept), "entries": entries}

    def restore(self, kept: dict[str, Any]) -> None:
        """Write what differs from what a dead process has kept."""
        wanted = {path: _Entry(*entry) for path, entry in kept["entries"].items()}
        folder = kept_folder(kept["folder"], _KIND)
        now = self._scan()
        changes = _differences(now, wanted)
        for _, entry in changes.values():
            if entry is not None and entry.kind == "file":
                self._take_over(folder, entry.content)
        self._apply(changes)
        self._tree.leave(self._pending(wanted))
        self._entries = wanted

    def discard(self, kept: dict[str, Any]) -> None:
        """Remove the folder with the contents."""
        remove_kept(kept["folder"], _KIND)

    def sweep(self) -> int:
        """Remove the folders of killed processes, and files that they had not renamed yet."""
        places = [Path(place) for place, _, _ in os.walk(self.path)]
        return sum(map(_sweep_temporary, places)) + sweep_folders(_KIND)

    def observe(self) -> object:
        """Return every path with what it holds."""
        if self._observe is not None:
            return self._observe(self.path)
        return {
            path: [entry.kind, entry.mode, entry.content] for path, entry in self._scan().items()
        }

    def close(self) -> None:
        """Remove the stored contents; the directory itself is left as it is."""
        self._folder.close()

    def _pending(self, now: dict[str, _Entry]) -> Changes:
        """Return what differs from the head of the tree."""
        return _differences(self._entries, now)

    def _require_there(self) -> None:
        # If a link took its place, a rollback would delete files elsewhere.
        if self.path.is_symlink() or not self.path.is_dir():
            raise NotFound(f"{self.path} is no longer a directory", path=str(self.path))

    def _scan(self) -> dict[str, _Entry]:
        self._require_there()
        started_ns = self._now_ns()
        return dict(self._walk(str(self.path), "", started_ns))

    def _walk(self, directory: str, prefix: str, now_ns: int) -> Iterator[tuple[str, _Entry]]:
        with os.scandir(directory) as found:
            for item in found:
                if _TEMPORARY.fullmatch(item.name):
                    continue
                path = prefix + item.name
                status = item.stat(follow_symlinks=False)
                mode = stat.S_IMODE(status.st_mode)
                if stat.S_ISDIR(status.st_mode):
                    # A folder of another system in this directory, perhaps in another process.
                    if item.name.startswith(PREFIX):
                        continue
                    yield path, _Entry("directory", mode)
                    yield from self._walk(item.path, f"{path}/", now_ns)
                elif stat.S_ISLNK(status.st_mode):
                    yield path, _Entry("link", 0, os.readlink(item.path))
                elif stat.S_ISREG(status.st_mode):
                    content = self._content(path, item.path, status, now_ns)
                    yield path, _Entry("file", mode, content, status.st_mtime_ns)

    def _content(self, path: str, file: str, status: os.stat_result, now_ns: int) -> str:
        """Return the hash of a file, reading it only if it may have changed; store its bytes."""
        known = self._known.get(path)
        if known is not None and known.signature == _signature(status) and self._trusts_times:
            changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
            if changed_ns < known.hashed_at_ns - _TICK_NS:
                return known.content
        for _ in range(_READS_MAX):
            content = self._keep(file)
            after = os.lstat(file)
            if _signature(after) == _signature(status):
                self._known[path] = _Known(_signature(status), now_ns, content)
                return content
            status = after
        raise SystemBusy(f"{file} changed while it was read; stop what writes to it")

    def _keep(self, file: str) -> str:
        digest = sha256()
        handle, temporary = tempfile.mkstemp(dir=self._kept)
        with os.fdopen(handle, "wb") as copy, open(file, "rb") as original:
            while chunk := original.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
        content = digest.hexdigest()
        os.replace(temporary, self._kept / content)
        return content

    def _take_over(self, folder: Path, content: str) -> None:
        place = self._kept / content
        if place.exists():
            return
        handle, temporary = tempfile.mkstemp(dir=self._kept)
        os.close(handle)
        shutil.copyfile(folder / content, temporary)
        os.replace(temporary, place)

    def _apply(self, changes: Changes) -> None:
        paths = sorted(changes)
        closed = self._open_directories(changes)
        for path in reversed(paths):
            now, wanted = changes[path]
            if now is not None and (wanted is None or now.kind != wanted.kind):
                self._remove(path, now)
        for path in paths:
            now, wanted = changes[path]
            if wanted is None:
                closed.pop(path, None)
            elif wanted.kind != "directory":
                closed.pop(path, None)
                self._write(path, wanted)
            else:
                # Its mode is set last, because it may forbid changes inside.
                closed[path] = wanted.mode
                (self.path / path).mkdir(exist_ok=True)
        for path, mode in sorted(closed.items(), reverse=True):
            (self.path / path).chmod(mode)

    def _remove(self, path: str, entry: _Entry) -> None:
        if entry.kind == "directory":
            # A process that was killed during a rollback may have left something there.
            _sweep_temporary(self.path / path)
            (self.path / path).rmdir()
        else:
            (self.path / path).unlink()

    def _write(self, path: str, entry: _Entry) -> None:
        place = self.path / path
        temporary = place.with_name(PREFIX + sha256(os.fsencode(path)).hexdigest()[:24])
        temporary.unlink(missing_ok=True)
        if entry.kind == "link":
            temporary.symlink_to(entry.content)
            os.replace(temporary, place)
            return
        shutil.copyfile(self._kept / entry.content, temporary)
        temporary.chmod(entry.mode)
        os.utime(temporary, ns=(entry.modified_ns, entry.modified_ns))
        os.replace(temporary, place)
        # Its times are new, so the next scan reads it again instead of trusting them.
        self._known.pop(path, None)

    def _open_directories(self, changes: Changes) -> dict[str, int]:
        """Make directories writable in which something changes; return their former modes."""
        modes = {}
        for path in sorted({path.rpartition("/")[0] for path in changes} | set(changes)):
            now, _ = changes.get(path, (_DIRECTORY, None))
            # A path that is no directory now may lead out of the tree through a link above it.
            if now is None or now.kind != _DIRECTORY.kind:
                continue
            place = self.path / path
            mode = stat.S_IMODE(place.stat().st_mode)
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                modes[path] = mode
                place.chmod(mode | stat.S_IRWXU)
        return modes

    def _now_ns(self) -> int:
        """Return the time that a file written now would have."""
        self._stamp.write_bytes(b"")
        os.utime(self._stamp)
        return self._stamp.stat().st_mtime_ns

    def _has_fine_times(self) -> bool:
        """Return whether file times have fractions of a second, which detecting changes needs."""
        probe = self.path / f"{PREFIX}probe"
        try:
            for _ in range(3):
                probe.write_bytes(b"")
                if probe.stat().st_ctime_ns % 1_000_000_000:
                    return True
                probe.unlink()
        finally:
            probe.unlink(missing_ok=True)
        warnings.warn(
            f"{self.path}: file times have whole seconds only, so every file is read at each "
            "checkpoint.",
            stacklevel=3,
        )
        return False


def _sweep_temporary(directory: Path) -> int:
    """Remove files in a directory that a rollback had not renamed yet; return how many."""
    ours = [name for name in os.listdir(directory) if _TEMPORARY.fullmatch(name)]
    for name in ours:
        (directory / name).unlink(missing_ok=True)
    return len(ours)


def _differences(before: dict[str, _Entry], now: dict[str, _Entry]) -> Changes:
    return {
        path: (before.get(path), now.get(path))
        for path in before.keys() | now.keys()
        if before.get(path) != now.get(path)
    }


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _require_own(path: Path) -> None:
    if not path.is_dir():
        raise InvalidArgument(f"path must be a directory; {path} is not")
    for precious in (Path.home().resolve(), Path.cwd().resolve()):
        if path == precious or path in precious.parents:
            raise InvalidArgument(
                f"{path} holds the home or the working directory; a rollback may delete whatever "
                "is in it, so give the world a directory of its own"
            )
