"""One model of a worker: its weights, its calls on their channels, and how it leaves the worker."""

import socket
import threading
import time
from collections.abc import Callable, Sequence

from gpu_manager.devices.loads import LoadUrgency
from gpu_manager.devices.worker_device import WorkerDevice
from gpu_manager.worker import orders
from gpu_manager.worker.call_reports import CallSums, MemoryRequests, Tell
from gpu_manager.worker.calls.admitted_leases import AdmittedLeases
from gpu_manager.worker.calls.call import CallAnswer
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.channel_server import CallObservers, ChannelServer, Programs
from gpu_manager.worker.executor import Executor
from gpu_manager.worker.features import AnswerFrame, CarryOut, ModelSpace, WorkerFeature
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.channel_state import MOST_CHANNELS
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.protocol import FrameKind

_MOST_TEXT = 500  # characters of a note: it may say what a function sent
_LEAVING_S = 2.0  # calls under way may last longer than anybody waits for


class HostedModel:
    """A model from the order to load it until nothing of it is left in the process."""

    def __init__(
        self,
        number: int,
        device: WorkerDevice,
        table: OperatorTable,
        together: CallsTogether,
        tell: Tell,
        lost: Callable[[], object],
        urgency: LoadUrgency,
        features: Sequence[WorkerFeature] = (),
    ) -> None:
        """`device` is this model's alone; `lost` ends the worker."""
        self.number = number
        self.device = device
        self.urgency = urgency
        self._clocks = together.clocks
        leases = AdmittedLeases(self._ended, self._claimed, together.clocks)
        self.relief = MemoryRequests(number, tell)
        self.executor = Executor(device, leases, self.relief.ask, together)
        self._programs = Programs(table)
        self._tell = tell
        self._ran = CallSums(number, self.executor.usage, tell)
        space = ModelSpace(number, self.executor, self._note)
        self.parts = [feature.begin(space) for feature in features]
        self.orders: dict[type[orders.WorkerOrder], CarryOut] = {
            orders.AdmitCalls: lambda order, _: leases.admit(order.admission),
            orders.EndCalls: lambda order, _: leases.end(order.lease),
            orders.AskComputed: lambda order, _: self._tell_computed(order.lease),
            orders.OpenChannel: self._open,
            orders.SetLimit: self._limit,
            orders.HurryLoad: lambda *_: urgency.hurry(),
        }
        frames: dict[FrameKind, AnswerFrame] = {}
        for part in self.parts:
            self.executor.extend(part.park, part.stand_in())
            self.orders |= part.orders
            frames |= part.frames
        self._observers = CallObservers(self._after_call, self._note, lost, frames)
        self._channels: dict[ChannelServer, threading.Thread] = {}
        self._settled = threading.Event()  # its load has ended, well or not

    def note_settled(self) -> None:
        self._settled.set()

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
        self._settled.wait()
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
        peak_bytes, held_bytes = self.executor.memory.peak_bytes, self.device.held_bytes()
        weights_bytes = sum([image.total_bytes for image in self.executor.images.values()])
        self._ran.add(lease, session, answer, peak_bytes, held_bytes, weights_bytes)
        self._report()

    def _report(self, *, at_once: bool = False) -> None:
        for part in self.parts:
            part.report(at_once=at_once)

    def _tell_computed(self, lease: int) -> None:
        computed_s = self._clocks.take(lease)
        self._tell(orders.CallsComputed(self.number, lease, computed_s))

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
