"""Asks a running GPU manager, as its administrator."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_manager.api import parse_address
from gpufaas.errors import CommandError
from torch_shim.dialing import connect
from torch_shim.errors import ShimError
from torch_shim.protocol import VERSION, Kind
from torch_shim.wire import Frame, Wire


def default_address(environment: Mapping[str, str]) -> str:
    """Where a manager of this user listens, unless it was told otherwise."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    folder = Path("/run/gpufaas") if os.geteuid() == 0 or not runtime else Path(runtime) / "gpufaas"
    return f"unix:{folder / 'node.sock'}"


def ask(address: str, credential: str, **fields: str | None) -> dict[str, Any]:
    """One administrative request and its answer; CommandError says why there is none."""
    hello = {"version": VERSION, "credential": credential, "session": secrets.token_hex(16)}
    try:
        wire = Wire(connect(str(parse_address(address))))
        try:
            wire.send(Kind.HELLO, [1, hello | {"pid": os.getpid(), "role": "admin"}])
            _answer(wire.receive())
            wire.send(Kind.ADMIN, [2, fields])
            return _answer(wire.receive())
        finally:
            wire.close()
    except (OSError, ShimError) as error:
        raise CommandError(f"no GPU manager answers at {address}: {error}") from error


def _answer(frame: Frame) -> dict[str, Any]:
    if frame.kind is Kind.REFUSED:
        _, failure, message, _ = frame.meta
        raise CommandError(f"{failure}: {message}")
    if frame.kind is not Kind.ANSWER:
        raise CommandError(f"the GPU manager said {frame.kind.name}")
    fields: dict[str, Any] = frame.meta[1]
    return fields
