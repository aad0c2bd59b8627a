"""What of a process, beside the inputs, changes the numbers that a program computes."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

# What torch's public settings ask, which take several times as long: every call asks them all.
from torch._C import _get_cudnn_allow_tf32 as _allows_tf32
from torch._C import _get_cudnn_benchmark as _benchmarks
from torch._C import _get_cudnn_deterministic as _is_cudnn_deterministic
from torch._C import _get_deterministic_algorithms as _is_deterministic
from torch._C import _get_deterministic_algorithms_warn_only as _only_warns
from torch._C import _get_float32_matmul_precision as _matmul_precision

from torch_shim.errors import RemoteFailure
from torch_shim.wire.messages import Arithmetic, Matmul
from torch_shim.wire.protocol import FailureKind


def arithmetic_in_force() -> Arithmetic:
    """This process's settings; RuntimeError where torch's two interfaces to tf32 are mixed."""
    deterministic = (1 if _only_warns() else 2) if _is_deterministic() else 0
    matmul = cast(Matmul, _matmul_precision())
    switches = _allows_tf32(), _benchmarks(), _is_cudnn_deterministic()
    return Arithmetic(matmul, *switches, deterministic)


def settings_in_force() -> tuple[Any, ...]:
    """What `settings_to_send` goes by, found quickly, for comparison alone.

    Nothing where torch's two interfaces to tf32 are mixed: no call is made so.
    """
    try:
        arithmetic = _matmul_precision(), _allows_tf32(), _benchmarks(), _is_cudnn_deterministic()
    except RuntimeError:
        return ()
    return (
        *arithmetic,
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        _is_deterministic(),
        _only_warns(),
    )


def use_arithmetic(wanted: Arithmetic) -> None:
    torch.set_float32_matmul_precision(wanted.matmul)
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = wanted.cudnn_tf32
    cudnn.benchmark = wanted.cudnn_benchmark
    cudnn.deterministic = wanted.cudnn_deterministic
    # The public function sets the compiler as well, which it imports for that: nothing is compiled
    # where this runs, and a worker may not be able to read further modules.
    torch._C._set_deterministic_algorithms(  # noqa: SLF001 - see above
        wanted.deterministic > 0, warn_only=wanted.deterministic == 1
    )


_USUAL = Arithmetic()


def settings_to_send() -> tuple[str | None, str | None, Arithmetic | None]:
    """Return autocast's data type, the default one, and the arithmetic; None for what is usual.

    RemoteFailure where no worker would compute so.
    """
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    default = torch.get_default_dtype()
    try:
        arithmetic = arithmetic_in_force()
    except RuntimeError as error:  # torch says so where both of its interfaces are used
        raise RemoteFailure(FailureKind.OPERATOR, f"tf32: {error}", {}) from error
    return (
        None if autocast is None else _name_of(autocast),
        None if default is torch.float32 else _name_of(default),
        None if arithmetic == _USUAL else arithmetic,
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class GeneratorTurns:
    """Calls that draw random numbers, one after the other.

    Two that sent the same state at once would draw the same numbers. A call waits for its turn with
    its lease, and without a channel: another one's turn may need that.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of_thread = threading.local()
        os.register_at_fork(after_in_child=self._renew)

    @contextmanager
    def state(self, *, drawn_from: bool) -> Iterator[bytes | None]:
        """The state to send; None for a call that draws nothing."""
        if not drawn_from:
            yield None
            return
        with self._lock:
            sent = self._of_thread.sent = _state()
            yield sent

    def alone(self) -> AbstractContextManager[Any]:
        """A turn without a call: the generator is another call's meanwhile."""
        return self._lock

    def drawn(self, sent: bytes | None, after: bytes) -> None:
        """Go on from where the worker came to.

        A thread that has drawn here meanwhile keeps its numbers: they would be drawn once more.
        """
        if sent == _state():
            torch.default_generator.set_state(as_state(after))

    def forget_sent(self) -> None:
        self._of_thread.sent = None

    @property
    def sent(self) -> bytes | None:
        """What this thread has sent last: its call may have waited, and others have drawn."""
        state: bytes | None = getattr(self._of_thread, "sent", None)
        return state

    def _renew(self) -> None:
        self._lock = threading.RLock()


def as_state(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


turns = GeneratorTurns()


def _state() -> bytes:
    state: bytes = torch.default_generator.get_state().numpy().tobytes()
    return state
