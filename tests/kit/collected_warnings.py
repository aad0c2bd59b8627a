"""Reports what only the garbage collector finds, at the end of the run, and fails the run for it.

A process that nobody waited for, or a socket that nobody closed, warns when the collector comes to
it, and pytest blames the test that is under way then. Here the collector comes at the end of each
module, what it finds is said with the module's name, and the module runs once more under
tracemalloc, which knows where an object was made. If it is found there again, the run has failed;
else an earlier module has made it, and it is only said, as is what the last collection finds.
"""

import gc
import subprocess
import sys
import traceback
import tracemalloc
from collections.abc import Generator
from typing import Any

import pytest

_FRAMES = 12
_AT_THE_END = "after the last test"


class CollectedWarnings:
    """The plugin of one process: of the whole run, or of one of xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._found: list[tuple[str, str]] = []  # modules, and what was found in them
        self._again: dict[str, str] = {}  # modules, and what they said when they ran once more
        self._module = "before the first test"
        self._usual = sys.unraisablehook

    def install(self) -> None:
        """Take what Python says of exceptions that it cannot raise."""
        sys.unraisablehook = self._note

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        self._module = str(item.path.relative_to(item.config.rootpath))
        done = yield
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()  # what is left stays: the next modules' collections shall not visit it
        return done

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take what a worker has found."""
        del error
        output = getattr(node, "workeroutput", {})
        self._found += [(module, text) for module, text in output.get("collected", [])]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # What outlived its module may have become garbage since; and a library says that objects
        # of its own have leaked, if they stay frozen at the exit.
        self._module = _AT_THE_END
        gc.unfreeze()
        gc.collect()
        sys.unraisablehook = self._usual
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["collected"] = self._found
            return
        is_failed = bool(self._found) and tracemalloc.is_tracing()
        if not tracemalloc.is_tracing():
            for module in sorted({module for module, _ in self._found} - {_AT_THE_END}):
                ran = _run_traced(module)
                self._again[module] = ran.stdout[-6000:]
                is_failed |= ran.returncode != pytest.ExitCode.OK
        if is_failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._found:
            return
        terminalreporter.section("found by the garbage collector", red=True)
        for module, text in self._found:
            terminalreporter.write_line(f"{module}:\n{text}")
        for module, words in self._again.items():
            terminalreporter.write_line(
                f"{module} once more, with where objects were made:\n{words}"
            )

    def _note(self, unraisable: "sys.UnraisableHookArgs") -> None:
        lines = traceback.format_exception(unraisable.exc_type, unraisable.exc_value, None)
        where = traceback.extract_tb(unraisable.exc_traceback)
        lines += [f"  in {unraisable.err_msg or 'the destructor'}: {unraisable.object!r}\n"]
        lines += traceback.format_list(where)[-3:]
        made = _made_at(unraisable)
        self._found.append((self._module, "".join(lines) + made))


def _made_at(unraisable: "sys.UnraisableHookArgs") -> str:
    """Where tracemalloc says that the object was made, or something that belongs to it."""
    objects = {"it": unraisable.object}
    if unraisable.exc_traceback is not None:  # of a destructor in Python: its frame has the object
        destroyed = unraisable.exc_traceback.tb_frame.f_locals.get("self")
        # Python 3.11 does not find an object itself whose attributes are laid out with it.
        objects = {"it": destroyed, **getattr(destroyed, "__dict__", {})}
    for name, each in objects.items():
        made = tracemalloc.get_object_traceback(each)
        if made is not None:
            return f"  {name} was made at\n" + "\n".join(made.format())
    return ""


def _run_traced(module: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, f"-Xtracemalloc={_FRAMES}", "-m", "pytest", "-q", module]
    return subprocess.run(command, check=False, capture_output=True, text=True)
