"""torch.cuda's streams and events: all work runs in program order, so no wait ever blocks."""

import threading
import time
from functools import partial
from typing import Any, NoReturn

import torch

from torch_shim.errors import UnsupportedCall
from torch_shim.patching import CUDA, DeviceLike, names_cuda, set_attribute


class _Completed:
    """Work that has completed when the call that submits it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once: no work is pending."""


class Stream(_Completed):
    """A stream of work."""

    def __init__(self, device: DeviceLike = None, priority: int = 0, **_: Any) -> None:
        names_cuda(device)
        self.priority = priority
        self.device = CUDA
        self.device_index = 0
        self.device_type = 1
        self.stream_id = id(self)
        self.cuda_stream = 0

    def is_capturing(self) -> bool:
        """Return False: streams are never captured."""
        return False

    def wait_event(self, event: object) -> None:
        """Return at once: no work is pending."""

    def wait_stream(self, stream: object) -> None:
        """Return at once: no work is pending."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Without an event, return a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        _current.entered.append(_current.stream)
        _current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.stream = _current.entered.pop()

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event(_Completed):
    """A point in time between two pieces of work."""

    def __init__(
        self,
        enable_timing: bool = False,  # noqa: FBT001, FBT002 - PyTorch's signature
        blocking: bool = False,  # noqa: FBT001, FBT002 - see above
        interprocess: bool = False,  # noqa: FBT001, FBT002 - see above
        external: bool = False,  # noqa: FBT001, FBT002 - see above
    ) -> None:
        del blocking, external
        if interprocess:
            raise UnsupportedCall(
                "torch.cuda.Event(interprocess=True)", "use an event of one process"
            )
        self.enable_timing = enable_timing
        self.device = CUDA
        self.recorded_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        del stream
        self.recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to another."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.recorded_s is None or end_event.recorded_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event.recorded_s - self.recorded_s) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once: no work is pending."""

    def ipc_handle(self) -> NoReturn:
        raise UnsupportedCall("torch.cuda.Event.ipc_handle", "use an event of one process")


class StreamContext:
    """`with torch.cuda.stream(...)`; for None the current stream stays."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *reason: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*reason)


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


class _Current(threading.local):
    """The current stream of each thread."""

    def __init__(self) -> None:
        self.stream = _default
        self.entered: list[Stream] = []


_default = Stream()
_current = _Current()


def current_stream(device: DeviceLike = None) -> Stream:
    names_cuda(device)
    return _current.stream


def default_stream(device: DeviceLike = None) -> Stream:
    """Return the stream that is current unless another one was set."""
    names_cuda(device)
    return _default


def set_stream(stream: Stream) -> None:
    _current.stream = stream


class ExternalStream(Stream):
    """Unsupported: a redirected GPU has no streams outside PyTorch."""

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedCall("torch.cuda.ExternalStream", "use torch.cuda.Stream()")


class AnyDevice(type):
    """The type of torch.Stream and torch.Event, whose instances are of the device that is named."""

    native: type
    on_gpu: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one of the GPU, where no device or the GPU is named, or one of torch's own."""
        device = kwargs.get("device", args[0] if args and _is_device(args[0]) else None)
        if device is not None and not names_cuda(device):
            return cls.native(*args, **kwargs)
        named = {name: value for name, value in kwargs.items() if name != "device"}
        return cls.on_gpu(*(args[1:] if args and _is_device(args[0]) else args), **named)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.native, cls.on_gpu))


def _is_device(value: object) -> bool:
    return isinstance(value, (str, torch.device)) or type(value) is int


def _any_device(native: type, on_gpu: type) -> type:
    made = AnyDevice(native.__name__, (), {"__module__": "torch", "__slots__": ()})
    made.native, made.on_gpu = native, on_gpu
    return made


def install() -> None:
    set_attribute(torch, "Stream", _any_device(torch.Stream, Stream))
    set_attribute(torch, "Event", _any_device(torch.Event, Event))
    for kind in (Stream, Event, ExternalStream):
        set_attribute(torch.cuda, kind.__name__, kind)
        set_attribute(torch.cuda.streams, kind.__name__, kind)
    set_attribute(torch.cuda, "StreamContext", StreamContext)
    set_attribute(torch.cuda, "get_stream_from_external", partial(ExternalStream))
    for function in (stream, current_stream, default_stream, set_stream):
        set_attribute(torch.cuda, function.__name__, function)
