"""A worker's life: warm, assigned to a tenant, loaded with a model, serving its calls, emptied.

An empty worker waits for the tenant's next model, or for its end. The main thread obeys the
manager and never computes, so that it answers whatever a call does.
"""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from gpu_manager.worker import worker_orders
from gpu_manager.worker.call_reports import CallSums, MemoryRequests
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.channel_server import CallObservers, ChannelServer
from gpu_manager.worker.calls.executor import CallAnswer, Executor
from gpu_manager.worker.program.channel_state import MOST_CHANNELS
from gpu_manager.worker.sandbox import give_up_rights
from gpu_manager.worker.worker_setup import WorkerSetup
from torch_shim.errors import WireError
from torch_shim.wire.arithmetic import Arithmetic, use_arithmetic
from torch_shim.wire.frame_socket import Frame, FrameSocket


def live(connection: socket.socket, parent: int, missing: list[str]) -> NoReturn:
    """Run a worker that takes its orders from this socket; the process ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the manager says when
    try:
        _WorkerLife(connection, parent, missing).obey()
    finally:
        os._exit(0)


# Of a channel's thread. An emulated GPU's memory is bounded by address space, which stacks take.
_STACK_BYTES = 2 << 20
_LEAVING_S = 2.0  # calls under way may last longer than anybody waits for


class _WorkerLife:
    """The process, as its orders see it."""

    def __init__(self, connection: socket.socket, parent: int, missing: list[str]) -> None:
        self._wire = FrameSocket(connection)
        self._sending = threading.Lock()
        self._parent = parent
        self._missing = missing
        self._leases = AdmittedLeases(self._ended, self._claimed)
        self._relief = MemoryRequests(self._tell)
        self._ran = CallSums(self._tell)
        self._reports = CallObservers(
            self._after_call,
            lambda text, trace: self._tell(worker_orders.Note(text, trace)),
            lambda: os._exit(1),
        )
        self._setup = WorkerSetup(
            lambda device, table: Executor(device, table, self._leases, self._relief.ask),
            self._tell,
        )
        self._channels: dict[ChannelServer, threading.Thread] = {}
        threading.excepthook = self._broke
        threading.stack_size(_STACK_BYTES)

    def obey(self) -> None:
        """Carry out orders until the manager hangs up."""
        handlers: dict[type[worker_orders.WorkerOrder], Callable[..., None]] = {
            worker_orders.Warm: self._setup.warm,
            worker_orders.Assign: self._assign,
            worker_orders.AdmitCalls: self._admit,
            worker_orders.EndCalls: lambda order: self._leases.end(order.lease),
            worker_orders.SetLimit: self._limit,
        }
        while True:
            try:
                frame = self._wire.receive()
                order = worker_orders.read(frame.kind, frame.meta)
            except WireError:
                self._leave()
                return
            if isinstance(order, worker_orders.StopWorker):
                self._leave()
                return
            if isinstance(order, worker_orders.EmptyWorker):
                if not self._empty():
                    return
            elif isinstance(order, worker_orders.LoadImage):
                self._setup.load(order, frame.descriptors)
            elif isinstance(order, worker_orders.OpenChannel):
                self._serve(order, frame)
            else:
                handlers[type(order)](order)

    def _admit(self, order: worker_orders.AdmitCalls) -> None:
        self._leases.admit(order.lease, order.owner, several=order.several)

    def _assign(self, order: worker_orders.Assign) -> None:
        overhead_bytes = self._setup.overhead_bytes()
        missing = give_up_rights(order.uid, order.descriptors, order.processes, self._parent)
        self._tell(worker_orders.Ready(self._missing + missing, overhead_bytes))
        self._setup.note_assigned()

    def _serve(self, order: worker_orders.OpenChannel, frame: Frame) -> None:
        executor, programs = self._setup.executor, self._setup.programs
        assert executor is not None
        assert programs is not None
        (descriptor,) = frame.descriptors
        connection = socket.socket(fileno=descriptor)
        if executor.sessions.has_too_many(order.session):
            connection.close()
            self._note(f"session {order.session} has {MOST_CHANNELS} channels: another is closed")
            return
        server = ChannelServer(
            connection,
            order.session,
            order.function,
            executor,
            self._leases,
            programs,
            self._reports,
        )
        thread = threading.Thread(target=server.serve, name="channel", daemon=True)
        self._channels = {known: of for known, of in self._channels.items() if of.is_alive()}
        try:
            thread.start()
            self._channels[server] = thread
        except RuntimeError as error:  # no more threads, or no address space for one
            server.close()
            self._note(f"a channel of session {order.session} is closed: {error}")

    def _leave(self) -> bool:
        """Let every channel send its function what only this worker has; whether all have ended."""
        for server in self._channels:
            server.end()
        deadline_s = time.monotonic() + _LEAVING_S
        for thread in self._channels.values():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._channels.values())

    def _empty(self) -> bool:
        """Let the model go and keep the GPU's context; False where that is impossible."""
        if not self._leave():
            self._note("a call goes on for too long: the worker cannot be emptied")
            return False
        self._channels.clear()
        self._ran.flush()
        try:
            freed = self._let_go()
        except (OSError, RuntimeError) as error:
            self._note(f"the worker cannot be emptied: {type(error).__name__}: {error}"[:500])
            return False
        if freed:
            self._tell(worker_orders.ContextCleared(self._setup.device.used_bytes()))
        else:
            self._note("something refers to the weights still: the worker cannot be emptied")
        return freed

    def _let_go(self) -> bool:
        """Drop weights, recordings and programs; whether nothing refers to the weights any more."""
        images = self._setup.take_images()
        use_arithmetic(Arithmetic())  # the next executor believes that it is in force
        self._leases = AdmittedLeases(self._ended, self._claimed)
        self._setup.await_model()
        gc.collect()  # what a failed call left may refer to itself
        freed = [image.close() for image in images]
        self._setup.device.clear()
        return all(freed)

    def _limit(self, order: worker_orders.SetLimit) -> None:
        if order.answers:
            self._relief.answer(order)
        elif self._setup.executor is not None:
            self._setup.executor.set_limit(order.limit_bytes)

    def _after_call(self, lease: int, answer: CallAnswer) -> None:
        assert self._setup.executor is not None
        self._ran.add(lease, answer.batch, answer.times[2], self._setup.executor.peak_bytes)

    def _ended(self, lease: int) -> None:
        self._ran.flush()
        self._tell(worker_orders.CallsEnded(lease))

    def _claimed(self, lease: int, session: str) -> None:
        self._tell(worker_orders.CallsClaimed(lease, session))

    def _tell(self, order: worker_orders.WorkerOrder) -> None:
        """Say something to the manager; when it cannot hear any more, the worker is over."""
        try:
            with self._sending:
                self._wire.send(worker_orders.KINDS[type(order)], list(order))
        except WireError:
            os._exit(0)

    def _broke(self, arguments: threading.ExceptHookArgs) -> None:
        """A channel's thread hit a fault of ours: the channel is gone, the worker goes on."""
        kind, error = arguments.exc_type.__name__, arguments.exc_value
        self._note(f"a channel ended by {kind}: {error}"[:500])

    def _note(self, text: str) -> None:
        self._tell(worker_orders.Note(text, ""))
