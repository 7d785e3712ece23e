"""A directory tree: what goes back, what is left alone, and what a scan must not miss."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from holdfast.errors import CheckpointError, InvalidArgument, NotFound, RollbackError
from holdfast.worlds import FileSystem, World, check_system

NAMES = ["a", "b", "c", "é", "x\udc80", "with space"]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileSystem]:
    root = tmp_path / "root"
    root.mkdir()
    system = FileSystem(root)
    yield system
    system.close()


def content_of(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for directory, below, names in os.walk(root):
        for name in below + names:
            path = Path(directory, name)
            status = path.lstat()
            key = str(path.relative_to(root))
            mode = stat.S_IMODE(status.st_mode)
            if path.is_symlink():
                found[key] = (str(path.readlink()),)
            elif path.is_dir():
                found[key] = (mode,)
            else:
                found[key] = (mode, path.read_bytes(), status.st_mtime_ns)
    return found


def is_real(path: Path, kind: Callable[[Path], bool]) -> bool:
    return kind(path) and not path.is_symlink()


def change(root: Path, random: Random) -> object:
    directories = [path for path in root.rglob("*") if is_real(path, Path.is_dir)]
    path = random.choice([root, *sorted(directories)]) / random.choice(NAMES)
    exists = path.exists() or path.is_symlink()
    match random.randrange(7):
        case 0 | 1 if not is_real(path, Path.is_dir):
            path.unlink(missing_ok=True)
            path.write_bytes(random.randbytes(random.randrange(4)))
        case 2 if exists:
            shutil.rmtree(path) if is_real(path, Path.is_dir) else path.unlink()
        case 3 if not exists:
            path.mkdir()
        case 4 if not exists:
            path.symlink_to(random.choice(["a", "nowhere"]))
        case 5 if exists and not path.is_symlink():
            path.chmod(random.choice([0o700, 0o755, 0o500]))
        case 6 if is_real(path, Path.is_file):
            rewrite_in_place(path, b"Z")
    return str(path)


def rewrite_in_place(path: Path, content: bytes) -> None:
    """Change a file without changing its size or its time of modification."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("seed", range(2))
def test_a_rollback_restores_what_was_there(files: FileSystem, seed: int) -> None:
    check_system(
        files,
        lambda random: change(files.path, random),
        lambda: content_of(files.path),
        seed=seed,
    )


def test_a_change_that_keeps_size_and_time_is_seen(files: FileSystem) -> None:
    path = files.path / "a"
    path.write_bytes(b"one")
    first = files.checkpoint("first")
    seen = files.observe()
    # Many changes fall into one tick of the clock, so that no time tells them apart.
    for number in range(100):
        rewrite_in_place(path, b"%03d" % number)
        before, seen = seen, files.observe()
        assert seen != before
    files.rollback(first)
    assert path.read_bytes() == b"one"


def test_unchanged_files_are_not_read_again_once_their_times_can_be_trusted(
    files: FileSystem,
) -> None:
    path = files.path / "a"
    path.write_bytes(b"one")
    first = files.checkpoint("first")

    def is_read() -> bool:
        before = files._known["a"].hashed_at_ns
        files.observe()
        return files._known["a"].hashed_at_ns != before

    while is_read():
        pass
    rewrite_in_place(path, b"two")
    assert is_read()
    files.rollback(first)
    assert path.read_bytes() == b"one"


def test_a_rollback_leaves_unchanged_files_alone(files: FileSystem) -> None:
    same, other = files.path / "same", files.path / "other"
    same.write_bytes(b"same")
    token = files.checkpoint("here")
    inode = same.stat().st_ino
    other.mkdir()
    (other / "deep").write_bytes(b"x")
    files.rollback(token)
    assert same.stat().st_ino == inode
    assert not other.exists()


def test_a_directory_that_forbids_changes_is_restored_all_the_same(files: FileSystem) -> None:
    closed = files.path / "closed"
    closed.mkdir()
    (closed / "a").write_bytes(b"one")
    closed.chmod(0o500)
    token = files.checkpoint("closed")
    closed.chmod(0o700)
    (closed / "a").unlink()
    (closed / "b").mkdir(mode=0o500)
    closed.chmod(0o500)
    files.rollback(token)
    assert content_of(closed).keys() == {"a"}
    assert stat.S_IMODE(closed.stat().st_mode) == 0o500
    closed.chmod(0o700)


@pytest.mark.parametrize("path", ["/", "~", ".", "missing"])
def test_a_directory_that_is_not_its_own_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument):
        FileSystem(Path(path).expanduser())


def test_a_directory_that_is_gone_refuses_the_rollback(files: FileSystem) -> None:
    world = World({"files": files})
    here = world.checkpoint("here")
    files.path.rmdir()
    with pytest.raises(NotFound, match="no longer a directory"):
        files.prepare(world.find(here).tokens["files"])
    files.path.mkdir()
    world.rollback(here)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    system = FileSystem(root, observe=lambda path: sorted(item.name for item in path.iterdir()))
    (root / "a").write_bytes(b"one")
    token = system.checkpoint("here")
    (root / "a").write_bytes(b"two")
    assert system.observe() == ["a"]
    system.rollback(token)
    kept = system._kept
    assert kept.is_dir()
    system.close()
    assert not kept.exists()
    assert [path.name for path in root.iterdir()] == ["a"]


def test_a_link_in_place_of_the_directory_refuses_the_rollback(
    files: FileSystem, tmp_path: Path
) -> None:
    (files.path / "a").write_text("a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    with World({"files": files}) as world:
        before = world.checkpoint("before")
        shutil.rmtree(files.path)
        files.path.symlink_to(elsewhere)
        with pytest.raises(RollbackError, match="is no longer a directory"):
            world.rollback(before)
        with pytest.raises(CheckpointError, match="is no longer a directory"):
            world.checkpoint("elsewhere")
    assert content_of(elsewhere).keys() == {"precious"}


def test_what_a_link_leads_to_keeps_its_mode(files: FileSystem, tmp_path: Path) -> None:
    inside = files.path / "link" / "below"
    inside.mkdir(parents=True)
    (inside / "file").write_text("inside")
    outside = tmp_path / "outside" / "below"
    outside.mkdir(parents=True)
    (outside / "file").write_text("outside")
    outside.chmod(0o500)
    token, before = files.checkpoint("before"), content_of(files.path)
    shutil.rmtree(files.path / "link")
    (files.path / "link").symlink_to(outside.parent)
    files.rollback(token)
    assert content_of(files.path) == before
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500
    assert (outside / "file").read_text() == "outside"


def test_a_rollback_that_was_killed_does_not_keep_a_directory(files: FileSystem) -> None:
    empty = files.checkpoint("empty")
    (files.path / "new").mkdir()
    (files.path / "new" / ".holdfast-0123456789abcdef01234567").write_text("half of i")
    files.rollback(empty)
    assert content_of(files.path) == {}


def test_a_file_with_such_a_name_belongs_to_its_user(files: FileSystem) -> None:
    notes, other = files.path / ".holdfast-notes", files.path / ".holdfast-0123456789abcdef01234567"
    notes.write_text("mine")
    other.write_text("half of i")
    token = files.checkpoint("before")
    assert files.sweep() == 1
    assert not other.exists()
    notes.write_text("changed")
    files.rollback(token)
    assert notes.read_text() == "mine"
