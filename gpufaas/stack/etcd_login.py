"""The only user of our own etcd, and its password in a file.

Users are set up over etcd's JSON gateway, which every etcd from 3.4 on has.
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

from common.time_limits import time_limit
from common.whole_files import make_file
from gpufaas.errors import EtcdFailed

USER = "root"

# An etcd's address: a port of loopback, or the path of a socket.
EtcdEndpoint = int | Path

_TIMEOUT_S = 10.0
_PASSWORD_BYTES = 32
_DISABLED = "authentication is not enabled"


@dataclass(frozen=True, slots=True)
class EtcdLogin:
    """The user's password, and the file that holds it."""

    password_file: Path
    password: str = field(repr=False)


def stored_login(folder: Path) -> EtcdLogin:
    """The password in this folder; a missing one is made, readable by its owner alone."""
    path = folder / "password"
    try:
        if not path.exists():  # without the password, the data cannot be read
            make_file(path, f"{secrets.token_urlsafe(_PASSWORD_BYTES)}\n".encode())
        mode = stat.S_IMODE(path.stat().st_mode)
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EtcdFailed(f"etcd's password: {path}: {error}") from error
    if mode & 0o077:
        raise EtcdFailed(f"{path}: others may read it (mode {mode:o}); chmod 600 it")
    if not password:
        raise EtcdFailed(f"{path}: it is empty; stop all schedulers and delete {folder}")
    return EtcdLogin(path, password)


async def requires_login(endpoint: EtcdEndpoint, login: EtcdLogin) -> bool:
    """Whether etcd requires our password; EtcdFailed if it requires another one."""
    try:
        await _authenticate(endpoint, login)
    except EtcdFailed as error:
        if _DISABLED in str(error):
            return False
        raise EtcdFailed(f"the password in {login.password_file}: {error}") from error
    return True


async def require_login(endpoint: EtcdEndpoint, login: EtcdLogin) -> None:
    """Enable authentication for our user, and delete all other users.

    Any program that could reach etcd before may have made users, one with our name among them.
    """
    for name in (await _auth_request(endpoint, "user/list")).get("users", []):
        await _auth_request(endpoint, "user/delete", {"name": name})
    await _auth_request(endpoint, "user/add", {"name": USER, "password": login.password})
    await _auth_request(endpoint, "user/grant", {"user": USER, "role": "root"})
    await _auth_request(endpoint, "enable")
    await _authenticate(endpoint, login)


async def http_answer(endpoint: EtcdEndpoint, method: str, path: str, body: bytes = b"") -> bytes:
    """The answer's head and body as bytes; empty if there is no answer."""
    head = f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        reader, writer = await _connection(endpoint)
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


async def _authenticate(endpoint: EtcdEndpoint, login: EtcdLogin) -> None:
    await _auth_request(endpoint, "authenticate", {"name": USER, "password": login.password})


async def _auth_request(
    endpoint: EtcdEndpoint, what: str, body: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """etcd's answer; EtcdFailed without an answer, or if etcd refuses."""
    question = json.dumps(body or {}).encode()
    try:
        async with time_limit(_TIMEOUT_S):
            answer = await http_answer(endpoint, "POST", f"/v3/auth/{what}", question)
    except TimeoutError:
        answer = b""
    head, _, content = answer.partition(b"\r\n\r\n")
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        shown = head.partition(b"\r\n")[0].decode(errors="replace") or "nothing"
        raise EtcdFailed(f"etcd answers {shown} to {what}")
    if "error" in reply:
        raise EtcdFailed(f"etcd refuses {what}: {reply['error']}")
    return reply


async def _connection(endpoint: EtcdEndpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(endpoint, int):
        return await asyncio.open_connection("127.0.0.1", endpoint)
    # The kernel takes 107 bytes for the path of a socket, and folders' paths may be longer.
    folder = os.open(endpoint.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{endpoint.name}")
    finally:
        os.close(folder)
