"""Trees of files that others may have made or change: walked by descriptors.

No symbolic link is followed, at any depth, and nothing is recursive: a function can nest folders
deeper than Python can call itself.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_LEVELS = 100
_MOST_ENTRIES = 300_000
_DELETED_AT_ONCE = 10_000


class TreeRefused(OSError):
    """A tree has something in it that it may not have."""


class TreeChanged(TreeRefused):
    """A folder or file was replaced after it had been looked at."""


# What opening a folder says if it was replaced by something else: a file, a link, another folder.
_CHANGES = (NotADirectoryError, TreeChanged)


class TreeEntry(NamedTuple):
    """A file, folder or link in a tree; `parent` is the open folder that has it."""

    path: str
    parent: int
    name: str
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, not a link to one."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)

    def opened(self) -> int:
        """A descriptor of this very file or folder; TreeChanged if it is another one by now."""
        handle = os.open(self.name, _FOLDER if self.is_folder else _FILE, dir_fd=self.parent)
        status = os.fstat(handle)
        if (status.st_dev, status.st_ino) != (self.status.st_dev, self.status.st_ino):
            os.close(handle)
            raise TreeChanged(f"{self.path} was replaced")
        return handle


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder that is no link itself."""
    handle = os.open(folder, _FOLDER)
    try:
        yield handle
    finally:
        os.close(handle)


def entries(
    top: int,
    *,
    most: int = _MOST_ENTRIES,
    levels: int = _MOST_LEVELS,
    skip: Callable[[str], bool] = lambda _: False,
    changing: bool = False,
) -> Iterator[TreeEntry]:
    """All entries below an open folder, each folder before what is in it, in order of their names.

    Names that `skip` selects are left out. TreeRefused if there are more than `most`, or if folders
    are nested more than `levels` deep, or if one is replaced, unless the tree may be `changing`.
    """
    count = 0
    opened = [("", os.dup(top), _names(top, most + 1))]
    try:
        while opened:
            prefix, folder, names = opened[-1]
            if not names:
                os.close(opened.pop()[1])
                continue
            name = names.pop()
            if skip(name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                entry = TreeEntry(f"{prefix}{name}", folder, name, status)
                count += 1
                if count > most:
                    raise TreeRefused(f"there are more than {most} files")
                yield entry
                if entry.is_folder:
                    if len(opened) > levels:
                        raise TreeRefused(f"there are more than {levels} levels of folders")
                    with contextlib.suppress(*_CHANGES if changing else ()):
                        below = entry.opened()
                        opened.append((f"{entry.path}/", below, _names(below, most + 1)))
    finally:
        for _, folder, _ in opened:
            os.close(folder)


def size_bytes(folder: Path) -> int:
    """Bytes on disk of all in a folder, which may change meanwhile; TreeRefused as in `entries`."""
    with opened(folder) as top:
        return sum(entry.status.st_blocks * 512 for entry in entries(top, changing=True))


def close_for_others(folder: Path, made_by: int) -> None:
    """Make a folder and all in it root's, and readable for all.

    TreeRefused if there is anything but folders, links and files, or if not all of it is of the
    user who made it: a link of the file system to somebody else's file looks like a file in it.
    """
    given: set[tuple[int, int]] = set()  # files that are in the tree under several names
    with opened(folder) as top:
        _give_to_root(top, os.fstat(top), made_by, str(folder))
        for entry in entries(top):
            identity = (entry.status.st_dev, entry.status.st_ino)
            if identity in given:
                continue
            if entry.status.st_nlink > 1 and not entry.is_folder:
                given.add(identity)
            _close_entry(entry, made_by)


def give_to(folder: Path, uid: int, gid: int) -> None:
    """Give a folder and all in it to another user and group; links are not followed."""
    with opened(folder) as top:
        os.fchown(top, uid, gid)
        for entry in entries(top):
            if not entry.is_file or entry.status.st_nlink == 1:
                os.chown(entry.name, uid, gid, dir_fd=entry.parent, follow_symlinks=False)


def remove(folder: Path) -> None:
    """Delete a folder with all in it, however deep, or a link or file; OSError if that fails."""
    try:
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return
    except OSError:  # a link, or no folder
        folder.unlink(missing_ok=True)
        return
    try:
        _empty(top)
    finally:
        os.close(top)
    folder.rmdir()


def _close_entry(entry: TreeEntry, made_by: int) -> None:
    if entry.is_link:
        _check_maker(entry.status, made_by, entry.path)
        os.chown(entry.name, 0, 0, dir_fd=entry.parent, follow_symlinks=False)
    elif entry.is_file or entry.is_folder:
        handle = entry.opened()
        try:
            _give_to_root(handle, entry.status, made_by, entry.path)
        finally:
            os.close(handle)
    else:
        raise TreeRefused(f"{entry.path} is neither a file nor a folder")


def _give_to_root(handle: int, status: os.stat_result, made_by: int, path: str) -> None:
    _check_maker(status, made_by, path)
    is_opened = stat.S_ISDIR(status.st_mode) or status.st_mode & stat.S_IXUSR
    os.fchown(handle, 0, 0)
    os.fchmod(handle, 0o755 if is_opened else 0o644)


def _check_maker(status: os.stat_result, made_by: int, path: str) -> None:
    if status.st_uid != made_by:
        raise TreeRefused(f"{path} belongs to user {status.st_uid}, who did not make it")


def _empty(top: int) -> None:
    """Delete all in an open folder: what is in a folder below moves up, until none is deep."""
    while names := _names(top, _DELETED_AT_ONCE):
        for name in names:
            if not _is_folder(name, top):
                os.unlink(name, dir_fd=top)
                continue
            below = _open_to_delete(name, top)
            try:
                _move_up(below, top)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=top)


def _move_up(folder: int, top: int) -> None:
    while names := _names(folder, _DELETED_AT_ONCE):
        for name in names:
            if _is_folder(name, folder):
                os.close(_open_to_delete(name, folder))
                os.rename(name, secrets.token_hex(8), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(name, dir_fd=folder)


def _open_to_delete(name: str, parent: int) -> int:
    if os.geteuid() != 0:  # root may open it whatever its rights are
        os.chmod(name, 0o700, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def _names(folder: int, most: int) -> list[str]:
    with os.scandir(folder) as scan:
        return sorted((entry.name for entry in islice(scan, most)), reverse=True)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
