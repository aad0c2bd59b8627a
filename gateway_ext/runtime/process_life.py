"""A process's life: settings, the socket, the handler's module, the end; or several processes."""

import argparse
import ctypes
import os
import random
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TextIO

from gateway_ext.runtime import handler_module
from gateway_ext.runtime.batches import handlers_of_lists
from gateway_ext.runtime.calls import Handler, OtherHandler
from gateway_ext.runtime.handler_module import HandlerKind
from gateway_ext.runtime.server import FunctionServer, write_line
from gateway_ext.runtime.settings import BadRuntimeSetting, RuntimeSettings
from gateway_ext.runtime.template import example_calls, process
from gateway_ext.runtime.template.fork_line import VARIABLE, ForkReport, OrderLine
from gateway_ext.runtime.template.forks import die_with, end_at_once

Load = Callable[[], Handler]

# Other kinds of handlers, by the environment: each may leave, with its import and its name here.
KINDS: Sequence[Callable[[Mapping[str, str]], HandlerKind[OtherHandler]]] = (handlers_of_lists,)


def main(environment: MutableMapping[str, str], command: Sequence[str]) -> int:
    """Serve until SIGTERM; the exit code. `command` is how this process was started.

    `environment` is that of the process: a template changes it for each instance.
    """
    options = _options()
    _flush_lines(sys.stdout, sys.stderr)
    try:
        settings = RuntimeSettings.from_environment(environment)
        kinds = [kind(environment) for kind in KINDS]
        load = partial(handler_module.load, Path(settings.handler), kinds)
        if options.examples:
            return _call_examples(settings, load)
        if VARIABLE in environment:
            return _serve_from_template(settings, environment, load)
        if options.worker is not None:
            return _work(settings, options, load)
        listener = listening(settings.listen)
    except (BadRuntimeSetting, BadListenAddress, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if settings.workers > 1:
        code, clean = Workers(settings, listener, command, environment).run(), True
    else:
        code, clean = _serve(settings, listener, load)
    leave(settings.listen)
    return _end(code, clean=clean)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="runtime", description="Serves one function.")
    parser.add_argument("--gpu", action="store_true", help="a mark for the gateway, without effect")
    parser.add_argument("--examples", action="store_true", help="make the example calls, and end")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _flush_lines(*streams: TextIO) -> None:
    for stream in streams:
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")


def _work(settings: RuntimeSettings, options: argparse.Namespace, load: Load) -> int:
    """Run one of several workers, which accepts connections once its parent agrees."""
    die_with(options.parent)
    os.set_inheritable(options.worker, False)
    listener = listening(f"fd:{options.listener}")
    code, clean = _serve(settings, listener, load, socket.socket(fileno=options.worker))
    return _end(code, clean=clean)


def _call_examples(settings: RuntimeSettings, load: Load) -> int:
    """Make the calls of example.json, or else a call without a body; 1 if one fails."""
    folder = Path(settings.handler)
    try:
        handler = load()
    except BaseException as error:  # noqa: BLE001 - every error of the user's module is logged
        sys.stderr.write(settings.errors.import_failure(error))
        return 1
    try:
        calls = example_calls.examples_in(folder)
        if not calls:
            without = "an empty call is made; write a typical one there"
            sys.stderr.write(f"there is no {example_calls.FILE}: {without}\n")
        example_calls.make(handler, calls or [example_calls.EMPTY], settings.hostname)
    except example_calls.BadExample as error:
        sys.stderr.write(settings.errors.example_failure(error))
        return 1
    return 0


def _serve_from_template(
    settings: RuntimeSettings, environment: MutableMapping[str, str], load: Load
) -> int:
    """Be a template, and serve in the instances that it becomes: only they return."""
    loaded = process.Template(Path(settings.handler), environment, load).until_instance()
    settings = RuntimeSettings.from_environment(environment)
    listener = listening(settings.listen)
    code, clean = _serve(settings, listener, loaded.get, loaded.parent)
    return _end(code, clean=clean)


def _serve(
    settings: RuntimeSettings,
    listener: socket.socket,
    load: Load,
    parent: socket.socket | None = None,
) -> tuple[int, bool]:
    """Serve to the end; the exit code, and whether nothing of the handler still runs."""
    service = FunctionServer(settings)
    # Before it is ready there is nothing to finish.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop() if service.is_ready else os._exit(0))
    service.start()
    if parent is None:
        service.listen(listener)
    try:
        handler = load()
    except BaseException as error:  # noqa: BLE001 - every error of the user's module is logged
        sys.stderr.write(settings.errors.import_failure(error))
        return 1, False
    if isinstance(handler, OtherHandler) and handler.notice:
        sys.stderr.write(f"{handler.notice}\n")
    service.ready(handler)
    if parent is not None and _may_listen(parent):
        service.listen(listener)
    return 0, service.wait()


def _may_listen(parent: socket.socket) -> bool:
    """Report to the parent that calls can be served; False if all workers shall end instead."""
    with parent, suppress(OSError):
        parent.sendall(b"R")
        return bool(parent.recv(1))
    return False


def _end(code: int, *, clean: bool) -> int:
    """The exit code; no return if threads of the handler would keep the process running."""
    if not clean:
        end_at_once(code)
    return code


_BACKLOG = 1024


class BadListenAddress(ValueError):
    """The address cannot be listened on."""


def listening(address: str) -> socket.socket:
    """A socket that listens there; an inherited one is not passed on to child processes."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return _unix(Path(rest))
    if kind == "tcp" and ":" in rest:
        host, _, port = rest.rpartition(":")
        return socket.create_server((host.strip("[]"), int(port)), backlog=_BACKLOG)
    if kind == "fd" and rest.isdecimal():
        os.set_inheritable(int(rest), False)
        return socket.socket(fileno=int(rest))
    raise BadListenAddress(f"{address!r} is not unix:/path, tcp:host:port or fd:number")


def leave(address: str) -> None:
    """Remove the file of a Unix socket."""
    kind, _, path = address.partition(":")
    if kind == "unix":
        Path(path).unlink(missing_ok=True)


def _unix(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()  # left by a process that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0  # one call may have ended a worker
_LIVED_LONG_S = 60.0
_LOOK_S = 0.2
_SET_ADOPTING = 36  # prctl's number: orphans among the descendants become children
_SIGNAL_STATUS = 128  # and the signal's number, as shells have it


class Workers:
    """Several processes that serve one socket: started, replaced when they die, stopped together.

    This is the parent: it serves health until the first worker serves everything.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        listener: socket.socket,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._command = command
        self._stopping = threading.Event()
        self._status, self._why = 0, ""
        self._was_ready = False  # any worker
        self._lobby = FunctionServer(settings)
        self._lobby_open = True
        self._lock = threading.Lock()
        self._template = WorkerTemplate(
            command, environment, Path(settings.handler), self._stopping.is_set
        )
        self._children: set[int] = set()
        self._reaping = threading.Lock()

    def run(self) -> int:
        """Serve until SIGTERM, or until a worker fails before any is ready; the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        signal.signal(signal.SIGINT, lambda *_: self._stopping.set())
        self._lobby.start()
        self._lobby.listen(self._listener.dup())
        keepers = [
            threading.Thread(target=self._keep, args=(number,), daemon=True)
            for number in range(self._settings.workers)
        ]
        for keeper in keepers:
            keeper.start()
        while not self._stopping.wait(_LOOK_S):
            self._reap_others()
        self._close_lobby()
        for keeper in keepers:
            keeper.join()
        self._template.close()
        self._listener.close()
        if self._why:  # the last line of all workers
            write_line(self._why)
        return self._status

    def _keep(self, number: int) -> None:
        pause_s, killed = _FIRST_PAUSE_S, False
        while not self._stopping.is_set():
            started_s = time.monotonic()
            status = self._live_once()
            if self._stopping.is_set():
                return
            if not self._was_ready and (status > 0 or killed):  # others would fail, too
                # Without a word if the worker chose its end: its last line says why.
                self._status = status if status > 0 else _SIGNAL_STATUS - status
                if status < 0:
                    self._why = f"worker {number} {_described(status)} again before it was ready"
                self._stopping.set()
                return
            killed = status < 0
            if time.monotonic() - started_s > _LIVED_LONG_S:
                pause_s = _FIRST_PAUSE_S
            write_line(
                f"worker {number} {_described(status)}; another one follows in {pause_s:g} s"
            )
            self._stopping.wait(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _live_once(self) -> int:
        process, line = self._begun()
        with line, suppress(OSError):  # the worker has died: `_wait` returns its status
            if self._is_ready(line):
                self._was_ready = True
                # First, so that no call meets the lobby's 503 once a worker has served one.
                self._close_lobby()
                line.sendall(b"G")
        try:
            return self._wait(process)
        finally:
            with self._reaping:
                self._children.discard(process.pid)

    def _begun(self) -> tuple["subprocess.Popen[bytes] | ForkedServer", socket.socket]:
        """A worker and the line to it: a fork of the template, else started anew."""
        forked = self._template.fork(self._listener.fileno())
        with self._reaping:
            if forked is not None:
                self._children.add(forked.pid)
                return forked, forked.line
            process, line = self._started_anew()
            self._children.add(process.pid)
            return process, line

    def _started_anew(self) -> tuple["subprocess.Popen[bytes] | ForkedServer", socket.socket]:
        ours, theirs = socket.socketpair()
        listener = self._listener.fileno()
        arguments = ["--worker", str(theirs.fileno()), "--listener", str(listener), "--parent"]
        with theirs:
            process = subprocess.Popen(
                [*self._command, *arguments, str(os.getpid())], pass_fds=(theirs.fileno(), listener)
            )
        return process, ours

    def _is_ready(self, worker: socket.socket) -> bool:
        """Wait until the worker can serve; False if it ends before, or all of them shall end."""
        worker.settimeout(_LOOK_S)
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                return bool(worker.recv(1))
        return False

    def _wait(self, process: "subprocess.Popen[bytes] | ForkedServer") -> int:
        while not self._stopping.wait(_LOOK_S / 4):
            if (status := process.poll()) is not None:
                return status
        process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + self._settings.stop_timeout_s + 2
        while (status := process.poll()) is None:
            if time.monotonic() > deadline_s:
                process.send_signal(signal.SIGKILL)
            time.sleep(_LOOK_S / 10)
        return status

    def _reap_others(self) -> None:
        """Take note of the end of adopted processes: templates, and what workers have left."""
        with self._reaping, suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in self._children:
                    return  # its keeper does so
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _close_lobby(self) -> None:
        with self._lock:
            if self._lobby_open:
                self._lobby_open = False
                self._lobby.stop()
                self._lobby.wait()


def _described(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    with suppress(ValueError):  # Python has no name for most real-time signals
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


class ForkedServer:
    """A worker that the template has forked; this process is its parent by now."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.line = line
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative if a signal ended the process; None while it lives."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._status = -signal.SIGKILL  # somebody else has taken note of its end
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        """No effect once the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class _Run(NamedTuple):
    """A template process: its line, and its id."""

    line: OrderLine
    pid: int


class WorkerTemplate:
    """Started with the first worker; once it cannot be used, workers are started anew."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        handler: Path,
        stopping: Callable[[], bool],
    ) -> None:
        self._command = command
        self._environment = dict(environment)
        self._name = environment.get("HOSTNAME", "")
        self._has_examples = (handler / example_calls.FILE).is_file()
        self._stopping = stopping
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._over = False

    def fork(self, listener: int) -> ForkedServer | None:
        """A worker that serves this socket; None if it must be started anew."""
        with self._lock:
            if self._over:
                return None
            try:
                return self._worker(self._run or self._started(), listener)
            except OSError as error:
                if not self._stopping():
                    write_line(f"workers are started without a template: {error}")
                self._end()
                return None

    def close(self) -> None:
        """End the template; its workers go on."""
        with self._lock:
            self._end()

    def _started(self) -> _Run:
        ctypes.CDLL(None).prctl(_SET_ADOPTING, 1, 0, 0, 0)
        line = OrderLine()
        with line.theirs as theirs:
            os.set_inheritable(theirs.fileno(), True)
            environment = {**self._environment, VARIABLE: str(theirs.fileno())}
            pid = os.posix_spawnp(self._command[0], list(self._command), environment)
        why = self._report(line, "imported", "failed").why
        self._run = _Run(line, pid)
        if self._has_examples and not why:
            self._run = self._warmed(self._run)
        return self._run

    def _warmed(self, before: _Run) -> _Run:
        """The template that has made the example calls; the one before if they failed."""
        warm = self._forked(before, "warm at once", [])
        try:
            is_warm = self._report(warm.line, "warmed", "failed").state == "warmed"
        except OSError as error:
            write_line(f"the example calls were not made: {error}")
            is_warm = False
        other = before if is_warm else warm
        other.line.close()
        return warm if is_warm else before

    def _worker(self, run: _Run, listener: int) -> ForkedServer:
        line, pid = self._forked(run, "worker", [listener])
        if pid == run.pid:  # it cannot be forked, and has become the worker
            self._end()
        return ForkedServer(pid, line.socket)

    def _forked(self, run: _Run, kind: str, descriptors: Sequence[int]) -> _Run:
        line = run.line.order(kind, self._name, {}, descriptors)
        pid = self._report(line, "began").pid
        line.confirm()
        return _Run(line, pid)

    def _report(self, line: OrderLine, *expected: str) -> ForkReport:
        """The next report; OSError if none comes, and the line is closed then."""
        poll = select.poll()
        poll.register(line.socket, select.POLLIN)
        try:
            while not self._stopping():
                if poll.poll(_LOOK_S * 1000):
                    return line.received(*expected)
            raise OSError("all shall end")
        except OSError:
            line.close()
            raise

    def _end(self) -> None:
        self._over = True
        if self._run is not None:
            self._run.line.close()  # at which it ends
            self._run = None
