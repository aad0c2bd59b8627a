"""One model of a worker: its weights, its calls on their channels, and how it leaves the worker."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_manager.devices.loads import LoadUrgency
from gpu_manager.devices.worker_device import WorkerDevice
from gpu_manager.worker import orders
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.call import CallAnswer
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.channel_server import CallObservers, ChannelServer, Programs
from gpu_manager.worker.executor import Executor
from gpu_manager.worker.features import (
    AnswerFrame,
    CarryOut,
    ModelSpace,
    TellManager,
    WorkerFeature,
)
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.inputs import MOST_CHANNELS
from torch_shim.wire.protocol import Frame, FrameKind

_MOST_TEXT = 500  # characters of a note: it may say what a function sent
_LEAVING_S = 2.0  # calls under way may last longer than anybody waits for


class HostedModel:
    """A model from the order to load it until nothing of it is left in the process."""

    def __init__(
        self,
        order: orders.LoadImage,
        device: WorkerDevice,
        table: OperatorTable,
        together: CallsTogether,
        tell: TellManager,
        lost: Callable[[], object],
        features: Sequence[WorkerFeature] = (),
    ) -> None:
        """`device` is this model's alone; `lost` ends the worker."""
        self.number = number = order.model
        self.device = device
        self.urgency = LoadUrgency(ahead=order.ahead)
        self._clocks = together.clocks
        leases = AdmittedLeases(self._ended, self._claimed, together.clocks)
        self.relief = MemoryRequests(number, tell)
        self.executor = Executor(device, leases, self.relief.ask, together)
        self._programs = Programs(table)
        self._tell = tell
        self._ran = CallSums(number, self.executor, tell)
        space = ModelSpace(number, self.executor, self._note)
        self.parts = [feature.begin(space) for feature in features]
        self.orders: dict[type[orders.WorkerOrder], CarryOut] = {
            orders.AdmitCalls: lambda order, _: leases.admit(order.admission),
            orders.EndCalls: lambda order, _: leases.end(order.lease),
            orders.AskComputed: self._tell_computed,
            orders.OpenChannel: self._open,
            orders.SetLimit: self._limit,
            orders.HurryLoad: lambda *_: self.urgency.hurry(),
        }
        frames: dict[FrameKind, AnswerFrame] = {}
        recorder = None
        for part in self.parts:
            self.executor.extend(part.park, part.stand_in())
            self.orders |= part.orders
            frames |= part.frames
            recorder = part.recorder or recorder
        self._observers = CallObservers(self._after_call, self._note, lost, frames, recorder)
        self._channels: dict[ChannelServer, threading.Thread] = {}
        self.settled = threading.Event()  # its load has ended, well or not

    def leave(self) -> bool:
        """Let every channel send its function what only this worker has; whether all have ended."""
        for server in self._channels:
            server.end()
        deadline_s = time.monotonic() + _LEAVING_S
        for thread in self._channels.values():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for part in self.parts:
            part.report(at_once=True)
        return not any(thread.is_alive() for thread in self._channels.values())

    def let_go(self, collect: Callable[[], None]) -> str:
        """Drop weights, recordings and programs; return what keeps them here, if anything does.

        `collect` finds what a failed call left: it may refer to itself.
        """
        self.settled.wait()
        self._channels.clear()
        self.executor.leases.end_all()
        self._ran.flush()
        images = list(self.executor.images.values())
        self.executor.images.clear()
        self.executor.memory.graphs.clear()
        for part in self.parts:
            part.let_go()
        self._programs.clear()
        collect()
        freed = [image.close() for image in images]
        self.device.clear()
        return "" if all(freed) else "something refers to the weights still"

    def _open(self, order: orders.OpenChannel, frame: Frame) -> None:
        """Serve calls on a channel, in a thread of its own."""
        (descriptor,) = frame.descriptors
        connection = socket.socket(fileno=descriptor)
        if self.executor.sessions.has_too_many(order.session):
            connection.close()
            self._note(f"session {order.session} has {MOST_CHANNELS} channels: another is closed")
            return
        server = ChannelServer(
            connection,
            order.session,
            order.function,
            self.executor,
            self._programs,
            self._observers,
        )
        thread = threading.Thread(target=self._serve, args=(server,), name="channel", daemon=True)
        self._channels = {known: of for known, of in self._channels.items() if of.is_alive()}
        try:
            thread.start()
            self._channels[server] = thread
        except RuntimeError as error:  # no more threads, or no address space for one
            server.close()
            self._note(f"a channel of session {order.session} is closed: {error}")

    def _limit(self, order: orders.SetLimit, _: Frame) -> None:
        """Use no more than this, or go on with the call that asked for more."""
        if order.answers:
            self.relief.answer(order)
        else:
            self.executor.memory.set_limit(order.limit_bytes)

    def _serve(self, server: ChannelServer) -> None:
        self.device.adopt_thread()
        server.serve()

    def _after_call(self, lease: int, session: str, answer: CallAnswer) -> None:
        self._ran.add(lease, session, answer)
        self._report()

    def _report(self, *, at_once: bool = False) -> None:
        for part in self.parts:
            part.report(at_once=at_once)

    def _tell_computed(self, order: orders.AskComputed, _: Frame) -> None:
        computed_s = self._clocks.take(order.lease)
        self._tell(orders.CallsComputed(self.number, order.lease, computed_s))

    def _ended(self, lease: int) -> None:
        """Report all calls up to now, the last of this lease among them."""
        self._ran.flush()
        self._report(at_once=True)
        computed_s = self._clocks.take(lease)
        self._tell(orders.CallsEnded(self.number, lease, computed_s))

    def _claimed(self, lease: int, session: str) -> None:
        self._tell(orders.CallsClaimed(self.number, lease, session))

    def _note(self, text: str, trace: str = "") -> None:
        self._tell(orders.Note(text[:_MOST_TEXT], trace))


_INTERVAL_S = 0.02  # between two reports about calls; the end of a lease is told at once
_MOST_PENDING = 64
_PATIENCE_S = 10.0  # for an answer to pressure: the manager's own patience is shorter


@dataclass(slots=True)
class _Sums:
    """Calls that are alike, summed up."""

    calls: int = 0
    run_s: float = 0.0
    peak_bytes: int = 0
    held_bytes: int = 0
    metrics: list[float] = field(default_factory=list)


class CallSums:
    """Sums up calls, so that many short ones do not drown the manager."""

    def __init__(self, model: int, executor: Executor, tell: TellManager) -> None:
        self._model = model
        self._executor = executor
        self._tell = tell
        self._lock = threading.Lock()
        self._told_s = 0.0
        # By lease, session, batch, and in groups of how many they ran.
        self._pending: dict[tuple[int, str, int, int], _Sums] = {}

    def add(self, lease: int, session: str, answer: CallAnswer) -> None:
        """A call of this lease ended well. The session is named if the lease is divided."""
        executor = self._executor
        peak_bytes, held_bytes = executor.memory.peak_bytes, executor.device.held_bytes()
        kept_bytes = sum([image.total_bytes for image in executor.images.values()])
        like = lease, session, answer.batch, answer.together
        with self._lock:
            sums = self._pending.get(like)
            if sums is None:
                if len(self._pending) >= _MOST_PENDING:
                    self._send()
                sums = self._pending[like] = _Sums()
            sums.calls += 1
            sums.run_s += answer.times[2]
            sums.peak_bytes = peak_bytes
            sums.held_bytes = max(held_bytes, sums.held_bytes)
            news = executor.usage.news(peak_bytes, held_bytes or kept_bytes)
            sums.metrics = news or sums.metrics
            if time.monotonic() - self._told_s > _INTERVAL_S:
                self._send()

    def flush(self) -> None:
        with self._lock:
            self._send()

    def _send(self) -> None:
        if self._pending:
            self._told_s = time.monotonic()
        for (lease, session, batch, together), sums in self._pending.items():
            run_s, memory = sums.run_s / sums.calls, (sums.peak_bytes, sums.held_bytes)
            like = self._model, lease, sums.calls, batch, run_s, *memory, together
            self._tell(orders.CallsRan(*like, sums.metrics, session))
        self._pending.clear()


class MemoryRequests:
    """Asks the manager for memory, one call at a time, and waits for its answer."""

    def __init__(self, model: int, tell: TellManager) -> None:
        self._model = model
        self._tell = tell
        self._number = 0
        self._answered = threading.Condition()
        self._answers: dict[int, orders.SetLimit] = {}

    def ask(self, lease: int, need_bytes: int) -> tuple[int | None, bool]:
        """The limit from now on, and whether the call may go on; no answer is a no."""
        with self._answered:
            self._number += 1
            number = self._number
            self._answers.clear()
            self._tell(orders.Pressure(self._model, number, lease, need_bytes))
            self._answered.wait_for(lambda: number in self._answers, _PATIENCE_S)
            answer = self._answers.get(number)
        return (None, False) if answer is None else (answer.limit_bytes, answer.retry)

    def answer(self, order: orders.SetLimit) -> None:
        with self._answered:
            self._answers[order.answers] = order
            self._answered.notify_all()
