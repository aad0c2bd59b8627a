"""What a worker does beside running calls: features, and the hooks that they have.

`life.py` names the features of a worker; the rest of it works without them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gpu_manager.devices.paths import DeviceLink
from gpu_manager.worker.calls.call import CallAnswer, ChannelCall
from gpu_manager.worker.executor import Executor, RunCall
from gpu_manager.worker.orders import LoadImage, WorkerOrder
from gpu_manager.worker.program.inputs import KeptStorages
from torch_shim.wire.messages import Call, CallAgain, CallResult, Done, Record
from torch_shim.wire.protocol import Frame, FrameKind

# Carries out an order, and has its descriptors.
CarryOut = Callable[[Any, Frame], object]
# Answers a frame of a session that keeps these storages.
AnswerFrame = Callable[[str, KeptStorages, Frame], Done]


class TellManager(Protocol):
    """Reports something to the manager, on any thread; the caller keeps the descriptors."""

    def __call__(self, order: WorkerOrder, descriptors: Sequence[int] = (), /) -> None: ...


class ChannelRecorder(Protocol):
    """The calls of one channel that run again by their numbers."""

    def keep(self, record: Record, asked: ChannelCall, answer: CallAnswer) -> str:
        """Record a call that was answered; else return why not."""

    def find(self, number: int, lease: int) -> ChannelCall:
        """Return a recorded call, for this lease; CallRefused where there is none."""

    def again(self, asked: CallAgain) -> Call:
        """Return a recorded call as it is to be made now; CallRefused where there is none."""

    def answered(self, number: int, answer: CallResult) -> CallResult:
        """Return the answer to a call that `again` returned, as it is to be sent."""

    def clear(self) -> None:
        """Forget all: the arena is another one."""


class WorkerSpace(NamedTuple):
    """What a feature gets of its worker; `background` does some work in a thread."""

    tell: TellManager
    background: Callable[[Callable[[], None]], None]


class ModelSpace(NamedTuple):
    """What a feature gets of one model of the worker; `note` is for the manager's log."""

    number: int
    executor: Executor
    note: Callable[[str], None]


class ModelFeature:
    """A feature's part of one model. Here no hook does anything."""

    orders: Mapping[type[WorkerOrder], CarryOut] = {}  # those about the model that it carries out
    frames: Mapping[FrameKind, AnswerFrame] = {}  # those that it answers on the model's channels
    recorder: Callable[[], ChannelRecorder] | None = None  # makes that of one more channel

    def stand_in(self) -> RunCall | None:
        """Return what runs the model's calls instead of the executor, if the feature does that."""
        return None

    def loaded(self, order: LoadImage) -> None:
        """Handle the end of the model's load."""

    def report(self, *, at_once: bool = False) -> None:
        """Report what is due, after a call and before the end of a lease; or all that there is."""

    def park(self) -> None:
        """Move what no call needs now to host memory; the gate is held."""

    def let_go(self) -> None:
        """Drop everything: the model's channels have ended."""


class WorkerFeature:
    """A feature's part of the process."""

    link: DeviceLink | None = None  # by which everything passes between the process and its GPU

    def __init__(self, worker: WorkerSpace) -> None:
        self.worker = worker

    def begin(self, model: ModelSpace) -> ModelFeature:
        """Make the part of a model that is about to be loaded."""
        raise NotImplementedError

    def answer_for_left(self, order: WorkerOrder) -> None:
        """Handle an order about a model that leaves, or has left."""
