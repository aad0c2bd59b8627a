"""Small programs as parts of a stack."""

import contextlib
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from common.liveness import Answers
from gpufaas.stack.supervisor import Part
from tests.kit.waiting import PATIENCE_S


async def at_once() -> bool:
    return True


async def never() -> bool:
    return False


def part(
    folder: Path,
    program: str,
    ready: Callable[[], Awaitable[bool]] = at_once,
    stop_s: float = 5.0,
    start_s: float = PATIENCE_S,
    answers: Answers | None = None,
) -> Part:
    """A Python program as a part."""
    command = (sys.executable, "-c", program)
    return Part("toy", command, folder / "toy.log", ready, {}, stop_s, start_s, answers)


def pids(folder: Path) -> list[int]:
    """Those that the toy wrote, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        return [int(line) for line in (folder / "pids").read_text().split()]
    return []


def noting(folder: Path, then: str) -> str:
    """A program that writes its pid down."""
    return (
        "import os, time\n"
        f"with open({str(folder / 'pids')!r}, 'a') as file: file.write(f'{{os.getpid()}} ')\n"
        f"{then}"
    )


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
