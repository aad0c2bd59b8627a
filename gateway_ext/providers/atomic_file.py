"""Writes files atomically."""

import os
import secrets
from pathlib import Path


def put(path: Path, content: bytes, mode: int, gid: int | None = None) -> None:
    """Write a file beside its place, then move it there; it is on disk when this returns."""
    scratch = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
            if gid is not None:
                os.fchown(file.fileno(), 0, gid)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
