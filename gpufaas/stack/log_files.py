"""Log files that other processes append to: their bound, and what was written last."""

import asyncio
import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

# A part's log has about so many bytes, the file of the lines before them at most twice as many.
MOST_LOG_BYTES = 8 << 20
_LOOK_S = 1.0
_COLLAPSE_RANGE = 8  # of fallocate(2)
_FULL = "no space left on device"
_LEAST_FREE_BYTES = 1 << 20  # with less, an etcd or a log cannot be written
_LAST_BYTES, _LAST_LINES, _LONGEST_LINE = 64 << 10, 5, 500
_LONGEST_SKIPPED = 4096  # of a line whose begin is lost


async def keep_short(log: Path) -> None:
    """Bound a log until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_S)
        await asyncio.to_thread(shorten, log, MOST_LOG_BYTES)


def shorten(log: Path, most_bytes: int) -> None:
    """Move the newest lines of a log that is longer than this to `NAME.log.1`.

    Whoever appends to the file has it open and goes on, so it is copied, not renamed. ext4 and XFS
    take off whole blocks of what was copied, and no line is lost; of the line that the last block
    cuts, which is copied whole, blanks stay. Elsewhere the file is emptied once nothing was
    appended while it was copied: what comes in that very moment is lost. On a full disk both files
    stay as they are.
    """
    aside = log.with_suffix(".log.1")
    with suppress(OSError), log.open("r+b") as file:  # it is missing, or the disk is full
        size = os.fstat(file.fileno()).st_size
        if size <= most_bytes:
            return
        if size > 2 * most_bytes:
            file.seek(size - most_bytes)
            file.readline(_LONGEST_SKIPPED)
        block = os.fstatvfs(file.fileno()).f_bsize
        copied = (size - 1) // block * block
        if shutil.disk_usage(log.parent).free + log_size(aside) < size - file.tell():
            return
        aside.unlink(missing_ok=True)  # first: it makes room for the copy
        try:
            _move(file, copied, aside)
        except OSError:  # the disk is full all the same
            aside.unlink(missing_ok=True)


def _move(file: BinaryIO, copied: int, aside: Path) -> None:
    """Copy what comes next in the file, to this byte at least, and take it off."""
    with aside.open("wb") as copy:
        copy.write(file.read(max(0, copied - file.tell())))
        rest = file.readline(_LONGEST_SKIPPED)
        if not rest.endswith(b"\n"):  # the line is too long, or not yet whole: it is cut
            file.seek(-len(rest), os.SEEK_CUR)
            rest = b""
        copy.write(rest)
        copy.flush()  # a full disk fails here, before anything is taken off
        if _is_taken_off(file.fileno(), copied):
            if rest:
                os.pwrite(file.fileno(), b"\n".rjust(file.tell() - copied), 0)
            return
        while os.fstat(file.fileno()).st_size > file.tell():
            shutil.copyfileobj(file, copy)
        copy.flush()
        file.truncate(0)


def _is_taken_off(descriptor: int, size: int) -> bool:
    """Have the kernel remove so many first bytes; False if this file system cannot."""
    numbers = ctypes.c_int64(0), ctypes.c_int64(size)
    failed: int = ctypes.CDLL(None).fallocate(descriptor, _COLLAPSE_RANGE, *numbers)
    return not failed


def log_size(log: Path) -> int:
    """The bytes of a log; 0 if there is none yet."""
    with suppress(OSError):
        return log.stat().st_size
    return 0


def last_words(log: Path, whose: str, since_bytes: int) -> str:
    """What a process that failed has logged since then, or that its disk is full."""
    lines = lines_since(log, since_bytes)[-_LAST_LINES:]
    with suppress(OSError):
        free_bytes = shutil.disk_usage(log.parent).free
        if free_bytes < _LEAST_FREE_BYTES or any(_FULL in line.lower() for line in lines):
            return f"{_FULL} in {log.parent}"
    shown = "\n".join(line[:_LONGEST_LINE] for line in lines)
    return f"the log of {whose}, {log}, ends with:\n{shown}" if shown else f"{whose} logged nothing"


def lines_since(log: Path, since_bytes: int) -> list[str]:
    """The latest lines that were logged since then."""
    with suppress(OSError), log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        since_bytes = since_bytes if since_bytes <= size else 0  # it was shortened
        file.seek(max(since_bytes, size - _LAST_BYTES))
        return file.read(_LAST_BYTES).decode(errors="replace").splitlines()
    return []
