"""Files that readers see whole: written beside their place, synced, then moved or linked there."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def put_file(path: Path, content: bytes, mode: int, gid: int | None = None) -> None:
    """Write a file in the place of the one before; it is on disk when this returns."""
    with _written_aside(path, content, mode, gid) as aside:
        aside.replace(path)


def make_file(path: Path, content: bytes) -> None:
    """Write a file for its owner alone, unless there is one: of several writers the first wins."""
    with (
        _written_aside(path, content, 0o600) as aside,
        contextlib.suppress(FileExistsError),
    ):
        path.hardlink_to(aside)


@contextlib.contextmanager
def _written_aside(path: Path, content: bytes, mode: int, gid: int | None = None) -> Iterator[Path]:
    """The name is random: a restarted container has the same process id, and may have left one."""
    aside = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty file
            os.fchmod(file.fileno(), mode)
            if gid is not None:
                os.fchown(file.fileno(), 0, gid)
        yield aside
    finally:
        aside.unlink(missing_ok=True)
