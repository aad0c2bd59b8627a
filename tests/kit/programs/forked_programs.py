"""Runs programs in forks of one process that has imported torch and its libraries once.

Each program is `__main__` of a process of its own, with its own arguments and standard streams.
Under `gpufaas exec` the libraries are imported under the shim, as the program would import them.
Started with `python -m tests.kit.programs.forked_programs MODULE...`: one JSON object a line in,
one a line out.
"""

# ruff: noqa: T201 - it answers on standard output

import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gateway_ext.runtime.template.forks import end_process
from tests.kit.programs.warm_process import READY, Answer, Order


def main() -> NoReturn:
    """Serve orders until standard input ends."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    if "torch_shim.capture.module_calls" in sys.modules:  # as in a function's template
        sys.modules["torch_shim.capture.module_calls"].import_tracing()
    gc.collect()
    gc.freeze()  # a fork's collections then write to none of the pages that it shares
    counts = os.environ.get("GPUFAAS_STATS")  # noqa: TID251 - set by `gpufaas exec` alone
    print(READY, flush=True)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        before = _counted(counts)
        child = os.fork()
        if child == 0:
            _be(order)
        status = _ended(child, order.limit_s)
        print(Answer(status, _counted(counts)[len(before) :]).text(), flush=True)
    end_process(0)


def _be(order: Order) -> NoReturn:
    """Run the program in this process, as Python runs a file, and end the process."""
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
    run_and_end(lambda: runpy.run_path(order.path, run_name="__main__"))


def run_and_end(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end this process as the interpreter would."""
    status = 0
    try:
        program()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter reports what a program raises
        traceback.print_exc()
        status = 1
    end_process(status)


def _ended(child: int, limit_s: float) -> int:
    """The exit status of the process, which is killed with its children after this time."""
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], limit_s)[0]:
            os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(descriptor)


def _counted(path: str | None) -> list[str]:
    """The lines that the shim's processes wrote when they ended."""
    return [] if path is None else Path(path).read_text("utf-8").splitlines()


if __name__ == "__main__":
    main()
