"""Runs programs in forks of one process that has imported torch and its libraries once.

Each program is `__main__` of a process of its own, with its own arguments and standard streams.
Under `gpufaas exec` the libraries are imported under the shim, as the program would import them.
Started with `python -m tests.compat.forked`: one JSON object a line in, one exit status a line out.
"""

# ruff: noqa: T201 - it answers on standard output

import json
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path

import accelerate  # noqa: F401 - programs find it imported, as all below
import timm  # noqa: F401
import torch._dynamo  # noqa: F401
import torchvision  # type: ignore[import-untyped]  # noqa: F401
import transformers  # noqa: F401

from tests.compat.warm import READY, Order


def main() -> int:
    """Serve orders until standard input ends; in a fork, the program's exit status."""
    print(READY, flush=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        child = os.fork()
        if child == 0:
            return _be(order)
        print(_ended(child, order.limit_s), flush=True)
    return 0


def _be(order: Order) -> int:
    """Run the program in this process, as Python runs a file."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    created = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, opened in enumerate(
        (null, os.open(order.output, created), os.open(order.errors, created))
    ):
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = [order.path, *order.arguments]
    sys.path[0] = str(Path(order.path).parent)
    try:
        runpy.run_path(order.path, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - as the interpreter reports what a program raises
        traceback.print_exc()
        return 1
    return 0


def _ended(child: int, limit_s: float) -> int:
    """The exit status of the process, which is killed with its children after this time."""
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], limit_s)[0]:
            os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
