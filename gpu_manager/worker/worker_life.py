"""A worker's life: warm, assigned to a tenant, loaded with models, serving their calls, emptied.

An empty worker waits for the tenant's next model, or for its end. The main thread obeys the
manager and never computes, so that it answers whatever a call does.
"""

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from gpu_manager.transfers.load_urgency import LoadUrgency
from gpu_manager.transfers.transfer_path import PathSpeed
from gpu_manager.worker import data_orders, worker_orders
from gpu_manager.worker.calls.calls_together import CallsTogether
from gpu_manager.worker.calls.lease_terms import LeaseTerms
from gpu_manager.worker.device.gpu_turns import GpuTurns
from gpu_manager.worker.device.pool.memory_pool import MemoryPool
from gpu_manager.worker.device.shares.slot_turns import SlotTurns
from gpu_manager.worker.lending.lent_storage import LentStorage
from gpu_manager.worker.sandbox import give_up_rights
from gpu_manager.worker.served_model import ServedModel
from gpu_manager.worker.shared_collection import SharedCollection
from gpu_manager.worker.worker_setup import WorkerSetup
from torch_shim.errors import WireError
from torch_shim.wire.frame_socket import Frame, FrameSocket


def live(
    connection: socket.socket, parent: int, missing: list[str], pool: MemoryPool | None
) -> NoReturn:
    """Run a worker that takes its orders from this socket; the process ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the manager says when
    try:
        _WorkerLife(connection, parent, missing, pool).obey()
    except BaseException:
        traceback.print_exc()  # which only GPUFAAS_WORKER_STDERR has anybody hear
        raise
    finally:
        os._exit(0)


_GATES = 2  # to the GPU and from it
# Of a channel's thread. An emulated GPU's memory is bounded by address space, which stacks take.
_STACK_BYTES = 2 << 20


class _WorkerLife:
    """The process, as its orders see it."""

    def __init__(
        self, connection: socket.socket, parent: int, missing: list[str], pool: MemoryPool | None
    ) -> None:
        self._wire = FrameSocket(connection)
        self._sending = threading.Lock()
        self._parent = parent
        self._missing = missing
        self._setup = WorkerSetup(self._tell, pool)
        self._together = CallsTogether()
        self._garbage = SharedCollection()
        self._models: dict[int, ServedModel] = {}
        threading.excepthook = self._broke
        threading.stack_size(_STACK_BYTES)

    def obey(self) -> None:
        """Carry out orders until the manager hangs up."""
        handlers: dict[type[worker_orders.WorkerOrder], Callable[..., None]] = {
            worker_orders.Warm: self._setup.warm,
            worker_orders.AdmitCalls: self._admit,
            worker_orders.EndCalls: self._end,
            worker_orders.AskComputed: self._say_computed,
            worker_orders.SetLimit: self._limit,
            worker_orders.DropModel: self._drop,
            data_orders.WithdrawData: self._withdraw,
            data_orders.LendData: self._lend,
            data_orders.DataGivenBack: self._given_back,
            data_orders.GrantData: self._grant,
            data_orders.RecallGrant: self._recall,
            worker_orders.HurryLoad: self._hurry,
        }
        with_descriptors: dict[type[worker_orders.WorkerOrder], Callable[..., None]] = {
            worker_orders.Assign: self._assign,
            worker_orders.LoadImage: self._load,
            worker_orders.OpenChannel: self._serve,
            data_orders.HandOver: self._hand_over,
            data_orders.DataBorrowed: self._borrowed,
        }
        while True:
            try:
                frame = self._wire.receive()
                order = worker_orders.read(frame.kind, frame.meta)
            except WireError:
                break
            if isinstance(order, worker_orders.StopWorker):
                break
            if type(order) in with_descriptors:
                with_descriptors[type(order)](order, frame)
            else:
                handlers[type(order)](order)
        for model in self._models.values():
            model.leave()

    # -- orders ---------------------------------------------------------------------------------

    def _assign(self, order: worker_orders.Assign, frame: Frame) -> None:
        gates, turns = frame.descriptors[:_GATES], frame.descriptors[_GATES:]
        if order.link:
            self._setup.device.link.connect(gates, _speed(order.link))
        else:
            turns = frame.descriptors
        for each in turns:
            if order.slots > 1:
                self._together.slots = SlotTurns(each)
            else:
                self._together.take_turns(GpuTurns(each))
        overhead_bytes = self._setup.overhead_bytes()
        missing = give_up_rights(order.uid, order.descriptors, order.processes, self._parent)
        self._tell(worker_orders.Ready(self._missing + missing, overhead_bytes))
        self._setup.note_assigned()

    def _load(self, order: worker_orders.LoadImage, frame: Frame) -> None:
        device = self._setup.device.part(order.model) if order.shared else self._setup.device
        urgency = LoadUrgency(ahead=order.ahead)
        model = ServedModel(
            order.model,
            device,
            self._setup.table,
            self._together,
            self._tell,
            lambda: os._exit(1),
            urgency,
        )
        self._models[order.model] = model
        self._setup.load(model, order, frame.descriptors)

    def _hurry(self, order: worker_orders.HurryLoad) -> None:
        model = self._models.get(order.model)
        if model is not None:
            model.urgency.hurry()

    def _admit(self, order: worker_orders.AdmitCalls) -> None:
        model = self._models.get(order.model)
        if model is not None:
            terms = LeaseTerms(tuple(order.slots), order.of, order.batch, order.vcpus)
            model.leases.admit(
                order.lease,
                order.owner,
                several=order.several,
                divided=order.divided,
                terms=terms,
            )

    def _end(self, order: worker_orders.EndCalls) -> None:
        model = self._models.get(order.model)
        if model is None:
            self._tell(worker_orders.CallsEnded(order.model, order.lease, 0.0))
        else:
            model.leases.end(order.lease)

    def _say_computed(self, order: worker_orders.AskComputed) -> None:
        model = self._models.get(order.model)
        if model is not None:
            model.tell_computed(order.lease)

    def _limit(self, order: worker_orders.SetLimit) -> None:
        model = self._models.get(order.model)
        if model is not None:
            if order.together_bytes:
                self._setup.device.limit_together(order.together_bytes)
            model.limit(order)

    def _serve(self, order: worker_orders.OpenChannel, frame: Frame) -> None:
        model = self._models.get(order.model)
        if model is not None:
            model.serve(order, frame)
            return
        for descriptor in frame.descriptors:
            os.close(descriptor)

    def _hand_over(self, order: data_orders.HandOver, frame: Frame) -> None:
        model = self._models.get(order.model)
        if model is not None and len(frame.descriptors) == 1:
            (descriptor,) = frame.descriptors
            self._setup.background(partial(model.hand_over, order, descriptor))
            return
        for descriptor in frame.descriptors:
            os.close(descriptor)
        self._tell(data_orders.HandedOver(order.model, order.handle, False))

    def _withdraw(self, order: data_orders.WithdrawData) -> None:
        model = self._models.get(order.model)
        if model is not None:
            model.executor.data.withdraw(order.handle)

    def _lend(self, order: data_orders.LendData) -> None:
        model = self._models.get(order.model)
        if model is not None:
            self._setup.background(partial(model.lend, order, self._lent))
        else:
            self._lent(order.model, order.handle, None)

    def _lent(self, number: int, handle: str, lent: LentStorage | None) -> None:
        if lent is None:
            self._tell(data_orders.DataLent(number, handle, False, 0, 0, b""))
            return
        size_bytes, offset, token, descriptor = lent
        answer = data_orders.DataLent(number, handle, True, size_bytes, offset, token)
        self._tell(answer, [descriptor] if descriptor >= 0 else [])
        if descriptor >= 0:
            os.close(descriptor)

    def _borrowed(self, order: data_orders.DataBorrowed, frame: Frame) -> None:
        model = self._models.get(order.model)
        if model is not None:
            model.borrowing.answer(order, frame.descriptors)
            return
        frame.close_descriptors()  # and the manager knows that the model has left

    def _given_back(self, order: data_orders.DataGivenBack) -> None:
        model = self._models.get(order.model)
        if model is not None:
            model.executor.data.given_back(order.handle)

    def _grant(self, order: data_orders.GrantData) -> None:
        model = self._models.get(order.model)
        if model is not None:
            model.puts.grant(order)

    def _recall(self, order: data_orders.RecallGrant) -> None:
        model = self._models.get(order.model)
        if model is not None:
            self._setup.background(model.puts.recall)

    def _drop(self, order: worker_orders.DropModel) -> None:
        """Let a model go in a thread of its own, while the others work."""
        model = self._models.pop(order.model, None)
        if model is None:
            self._dropped(order.model)
            return
        self._setup.background(partial(self._leave, model))

    # -- parts ----------------------------------------------------------------------------------

    def _leave(self, model: ServedModel) -> None:
        """Let a model go and keep the GPU's context; end the worker where that is impossible."""
        why = "" if model.leave() else "a call goes on for too long"
        if not why:
            try:
                why = model.let_go(self._garbage.collect)
            except (OSError, RuntimeError) as error:
                why = f"{type(error).__name__}: {error}"
        if why:
            self._tell(worker_orders.Note(f"a model cannot leave the worker: {why}"[:500], ""))
            os._exit(0)
        self._dropped(model.number)

    def _dropped(self, number: int) -> None:
        self._tell(worker_orders.ModelDropped(number, self._setup.device.used_bytes()))

    def _tell(self, order: worker_orders.WorkerOrder, descriptors: Sequence[int] = ()) -> None:
        """Say something to the manager; when it cannot hear any more, the worker is over."""
        try:
            with self._sending:
                fields = worker_orders.report_fields(order)
                self._wire.send(worker_orders.KINDS[type(order)], fields, (), descriptors)
        except WireError:
            os._exit(0)

    def _broke(self, arguments: threading.ExceptHookArgs) -> None:
        """A channel's thread hit a fault of ours: the channel is gone, the worker goes on."""
        kind, error = arguments.exc_type.__name__, arguments.exc_value
        self._tell(worker_orders.Note(f"a channel ended by {kind}: {error}"[:500], ""))


def _speed(link: list[float]) -> PathSpeed:
    bytes_per_s, block_bytes = link
    return PathSpeed(bytes_per_s, int(block_bytes))
