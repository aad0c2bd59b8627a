"""Tells a full disk from other failures of a file or a database."""

import errno
import sqlite3

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full_disk(error: BaseException) -> bool:
    """Whether an operation failed since there is no room left, for all or for this user."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    full = sqlite3.SQLITE_FULL
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", None) == full
