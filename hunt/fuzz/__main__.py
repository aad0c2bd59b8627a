"""Starts `command.py` with guarded memory preloaded, which is compiled once a machine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from tests.kit.cache import made_once

_SOURCE = Path(__file__).with_name("guarded_memory.c")


def main() -> NoReturn:
    """Become the command, with the same arguments; one thread, so that sums have one order."""
    more = {"LD_PRELOAD": str(guard()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hunt.fuzz.command", *sys.argv[1:]]
    os.execve(command[0], command, {**os.environ, **more})


def guard() -> Path:
    """The library that places tensors between inaccessible pages, compiled once a machine."""

    def compiled(target: Path) -> None:
        command = ["cc", "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(target)]
        subprocess.run(command, check=True)

    return made_once("guarded_memory.so", _SOURCE.read_bytes(), compiled)


if __name__ == "__main__":
    main()
