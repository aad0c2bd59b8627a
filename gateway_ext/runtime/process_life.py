"""The process's life: settings, the socket, the handler's module, and the end."""

import argparse
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from gateway_ext.runtime import handler_module
from gateway_ext.runtime.batches import handlers_of_lists
from gateway_ext.runtime.calls import Handler, OtherHandler
from gateway_ext.runtime.handler_module import HandlerKind
from gateway_ext.runtime.server import FunctionServer
from gateway_ext.runtime.serving_processes import Workers
from gateway_ext.runtime.settings import BadRuntimeSetting, RuntimeSettings
from gateway_ext.runtime.template import example_calls, fork_line, process
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
        if fork_line.VARIABLE in environment:
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
