"""Who is let in by an etcd of our own: one user, whose password is in a file, and nobody else.

It is all asked for over etcd's JSON gateway, which every etcd from 3.4 on has.
"""

import asyncio
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpufaas.errors import EtcdFailed

USER = "root"

# Where an etcd answers: a port of loopback, or a socket in a folder.
Door = int | Path

_ANSWER_S = 10.0
_PASSWORD_BYTES = 32
_OPEN_TO_ALL = "authentication is not enabled"


@dataclass(frozen=True, slots=True)
class Access:
    """How to be let in."""

    password_file: Path
    password: str = field(repr=False)


def kept_access(folder: Path) -> Access:
    """With the password in this folder, which is made, for its owner alone, where it is missing."""
    path = folder / "password"
    try:
        if not path.exists():
            _make(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EtcdFailed(f"etcd's password: {path}: {error}") from error
    if mode & 0o077:
        raise EtcdFailed(f"{path}: others may read it (mode {mode:o}); chmod 600 it")
    if not password:
        raise EtcdFailed(f"{path}: it is empty; stop all schedulers and delete {folder}")
    return Access(path, password)


async def asks_everybody(door: Door, access: Access) -> bool:
    """Whether it wants ours from everybody; EtcdFailed where it wants another password."""
    try:
        await _pass(door, access)
    except EtcdFailed as error:
        if _OPEN_TO_ALL in str(error):
            return False
        raise EtcdFailed(f"the password in {access.password_file}: {error}") from error
    return True


async def ask_everybody(door: Door, access: Access) -> None:
    """From now on let in nobody without ours; whatever users there were are users no more.

    Whoever could reach it until now may have made some, under our name, too.
    """
    for name in (await _told(door, "user/list")).get("users", []):
        await _told(door, "user/delete", {"name": name})
    await _told(door, "user/add", {"name": USER, "password": access.password})
    await _told(door, "user/grant", {"user": USER, "role": "root"})
    await _told(door, "enable")
    await _pass(door, access)


async def ask(door: Door, method: str, path: str, body: bytes = b"") -> bytes:
    """All that it answers, head and body; nothing where it does not."""
    head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        reader, writer = await _connection(door)
    except OSError:
        return b""
    try:
        writer.write(head.encode() + body)
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _make(path: Path) -> None:
    """Written aside and linked into place, so that nobody reads half, and the first one stays."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)  # of one who was killed
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(_PASSWORD_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a lost one would lock us out of the data
        with suppress(FileExistsError):  # another scheduler was first
            path.hardlink_to(aside)
    finally:
        aside.unlink()


async def _pass(door: Door, access: Access) -> None:
    await _told(door, "authenticate", {"name": USER, "password": access.password})


async def _told(door: Door, what: str, body: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Its answer; EtcdFailed where it is none, or a refusal."""
    question = json.dumps(body or {}).encode()
    try:
        async with asyncio.timeout(_ANSWER_S):
            answer = await ask(door, "POST", f"/v3/auth/{what}", question)
    except TimeoutError:
        answer = b""
    head, _, said = answer.partition(b"\r\n\r\n")
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        shown = head.partition(b"\r\n")[0].decode(errors="replace") or "nothing"
        raise EtcdFailed(f"etcd says {shown} to {what}")
    if "error" in found:
        raise EtcdFailed(f"etcd refuses {what}: {found['error']}")
    return found


async def _connection(door: Door) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(door, int):
        return await asyncio.open_connection("127.0.0.1", door)
    # The kernel takes 107 bytes for the path of a socket, and folders' paths may be longer.
    folder = os.open(door.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{door.name}")
    finally:
        os.close(folder)
