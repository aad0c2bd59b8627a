"""The life of a template: it imports the handler, makes example calls, and forks when ordered.

The gateway's orders come over a socket, whose other end trusts nothing that is sent here. A fork
leaves the template by way of a process in between, so that whoever keeps the template becomes its
parent: it is looked after, and ends, as if it had been started anew.
"""

import importlib
import os
import socket
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from gateway_ext.runtime.calls import Handler
from gateway_ext.runtime.handler_module import HandlerErrors
from gateway_ext.runtime.template import example_calls, forks
from gateway_ext.runtime.template.example_calls import BadExample
from gateway_ext.runtime.template.fork_line import VARIABLE, ControlLine, ForkOrder
from gateway_ext.runtime.template.forks import RandomStates, SingleThread, die_with

_SHIM = "torch_shim.capture.module_calls"
# A template waits for its traces: a thread that makes them would keep it from being forked.
_TRACING, _WAIT = "GPUFAAS_TRACING", "wait"
# The orders to make the example calls, and the pauses in which calls that are put off, as by a
# quota, are made again: the gateway waits for ten minutes, workers wait for it with their start.
_WARM_PAUSES_S = {"warm": (1, 2, 4, 8, 15, 30, 60, 60, 60, 60), "warm at once": ()}
_STANDARD = (0, 1, 2)


class Loaded(NamedTuple):
    """What a fresh instance begins with: the handler, or the error of its import.

    One of several workers has its line to the process that looks after all of them.
    """

    handler: Handler | None
    error: BaseException | None
    parent: socket.socket | None = None

    def get(self) -> Handler:
        if self.handler is None:
            assert self.error is not None, "an import without a result has raised an error"
            raise self.error
        return self.handler


class Template:
    """This process, until it has become an instance."""

    def __init__(
        self, folder: Path, environment: MutableMapping[str, str], load: Callable[[], Handler]
    ) -> None:
        self._folder = folder
        self._load = load
        self._environment = environment
        self._keeper = os.getppid()
        self._name = environment.get("HOSTNAME", "")
        self._variable = f"{VARIABLE}={environment[VARIABLE]}"
        self._line = ControlLine(int(environment.pop(VARIABLE)))
        self._random = RandomStates()
        self._threads = SingleThread()
        self._tracing = environment.get(_TRACING)
        environment[_TRACING] = _WAIT
        self._loaded = Loaded(None, None)
        self._is_spare = False  # a fork that was made in advance

    def until_instance(self) -> Loaded:
        """Carry orders out until one has made this process an instance."""
        self._import()
        state = "imported" if self._loaded.error is None else "failed"
        self._line.report(state=state, why=self._obstacle())
        while (order := self._line.order()) is not None:
            if order.kind in ("serve", "worker") and self._becomes_instance(order):
                if order.kind == "worker":
                    return self._loaded._replace(parent=self._line.give_away())
                self._line.close()
                return self._loaded
            if order.kind in _WARM_PAUSES_S and self._is_forked(order):
                self._warm(_WARM_PAUSES_S[order.kind])
            if order.kind == "spare":
                self._is_spare = self._becomes_spare(order)
        os._exit(0)

    def _import(self) -> None:
        try:
            self._loaded = Loaded(self._load(), None)
        except BaseException as error:  # noqa: BLE001 - the instance that this process becomes logs it
            self._loaded = Loaded(None, error)
        self._random.imported()
        _shim_step("import_tracing")
        _shim_step("close_sessions")  # the import may have called a model

    def _obstacle(self, ordered: Sequence[int] = ()) -> str:
        """Why this process cannot be forked; empty if it can. `ordered` came with an order."""
        if self._loaded.handler is None:
            return "its handler cannot be imported"
        self._threads.end_pools()
        return forks.obstacle({*_STANDARD, self._line.descriptor, *ordered})

    def _warm(self, pauses_s: Sequence[float]) -> None:
        """Make the example calls, in the template that takes the place of its parent."""
        try:
            self._make_examples(pauses_s)
        except BadExample as error:
            errors = HandlerErrors(str(self._folder.absolute()))
            sys.stderr.write(errors.example_failure(error))
            self._line.report(state="failed", why=str(error))
            os._exit(1)
        self._line.report(state="warmed", why="")

    def _make_examples(self, pauses_s: Sequence[float]) -> None:
        calls = example_calls.examples_in(self._folder)
        example_calls.make(self._loaded.get(), calls, self._name, pauses_s)
        _shim_step("close_sessions")
        self._random.begin_anew()
        if why := self._obstacle():
            raise BadExample(f"after the calls of {example_calls.FILE} {why}")

    # -- a new process -------------------------------------------------------------------------

    def _becomes_instance(self, order: ForkOrder) -> bool:
        """Fork an instance, or become one if this process cannot be forked; True in the instance.

        In both cases the work of the import is not done again.
        """
        if self._is_spare or self._obstacle(order.descriptors):
            self._take_place(order)
        elif not self._is_forked(order):
            return False
        forks.hide(self._variable)
        self._threads.end()
        self._random.begin_anew()
        self._trace_as_asked()
        return True

    def _becomes_spare(self, order: ForkOrder) -> bool:
        """Fork what waits to be an instance; True there. What cannot be forked declines."""
        if self._obstacle(order.descriptors):
            for descriptor in order.descriptors:
                os.close(descriptor)
            return False
        return self._is_forked(order)

    def _trace_as_asked(self) -> None:
        if self._tracing is None:
            del self._environment[_TRACING]
        else:
            self._environment[_TRACING] = self._tracing
        if self._tracing != _WAIT:
            _shim_step("trace_in_background")

    def _is_forked(self, order: ForkOrder) -> bool:
        """Make a process that is nobody's child but the keeper's; True in that process."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what is left would be written by each fork once more
        released, release = os.pipe()
        between = os.fork()
        if not between:
            _leave_between()
            os.close(release)
            if not os.read(released, 1):
                os._exit(1)  # the template has died meanwhile
            os.close(released)
            self._begin(order)
            return True
        os.waitpid(between, 0)
        os.write(release, b"1")
        for descriptor in (released, release, *order.descriptors):
            os.close(descriptor)
        return False

    def _begin(self, order: ForkOrder) -> None:
        """In the new process: have nothing of the template's, and tell the gateway."""
        os.setsid()
        die_with(self._keeper)
        forks.reopen_files({*_STANDARD, self._line.descriptor, *order.descriptors})
        self._take_place(order)

    def _take_place(self, order: ForkOrder) -> None:
        """Take the name, the output, the line and the variables that the order has.

        A worker keeps the output of the process that looks after it.
        """
        line, *others = order.descriptors
        forks.rename(self._name, order.name)
        self._name = order.name
        self._environment.update(order.environment)
        if others and order.kind != "worker":
            output = others.pop(0)
            for number in (1, 2):
                os.dup2(output, number)
            os.close(output)
        self._line.close()
        self._line = ControlLine(line)
        if others:
            self._environment["GPUFAAS_LISTEN"] = f"fd:{others[0]}"
        self._line.report(state="began", why="")
        if not self._line.confirmed():
            os._exit(1)


def _leave_between() -> None:
    """In the process in between: fork once more, and end."""
    try:
        if not os.fork():
            return
    except OSError as error:
        sys.stderr.write(f"an instance cannot be forked: {error}\n")
    os._exit(0)


def _shim_step(name: str) -> None:
    """Have the shim take one of its steps before a fork, in a process that has imported it."""
    if "torch" not in sys.modules or "torch_shim.start" not in sys.modules:
        return
    module: ModuleType = importlib.import_module(_SHIM)
    step: Callable[[], None] = getattr(module, name)
    step()
