"""The memory of one GPU that models and empty processes are granted: pure accounting, in bytes."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cache_manager.model.ids import ModelId


class ProcessUse(NamedTuple):
    """One worker process: what it takes by measure, and what it was granted."""

    pid: int
    measured_bytes: int
    granted_bytes: int

    @property
    def over_bytes(self) -> int:
        return max(0, self.measured_bytes - self.granted_bytes)


@dataclass(slots=True, eq=False)
class Account:
    """What a model, or the process that it has left, is granted, and what was measured of it."""

    granted_bytes: int = 0
    resting_bytes: int = 0  # weights and context
    peak_bytes: int | None = None  # the most of all runs, None before the first

    @property
    def measured_bytes(self) -> int:
        """The highest measurement; 0 if there is none."""
        return max(self.resting_bytes, self.peak_bytes or 0)


class Ledger:
    """The memory of one GPU; the sum of the bytes granted never exceeds its capacity.

    A model may use its limit: the bytes granted to the model and, while it runs, the free bytes.
    The measured peak of a run is granted afterwards if it still fits.
    """

    def __init__(self, capacity_bytes: int, context_bytes: int = 0) -> None:
        """`context_bytes` is the memory of a process before it holds a model."""
        self.capacity_bytes = capacity_bytes
        self.context_bytes = context_bytes
        self._granted_bytes = 0  # of all accounts together
        self._set_aside_bytes = 0
        self._withheld_bytes = 0

    @property
    def granted_bytes(self) -> int:
        return self._granted_bytes + self._set_aside_bytes

    @property
    def set_aside_bytes(self) -> int:
        return self._set_aside_bytes

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.granted_bytes - self._withheld_bytes

    def ever_fits(self, needed_bytes: int) -> bool:
        """Whether this many bytes would fit if every model left."""
        return needed_bytes <= self.capacity_bytes - self._set_aside_bytes

    def grow(self, account: Account, needed_bytes: int) -> int:
        """Grant at least this much; return the bytes lacking, if it cannot be granted."""
        more_bytes = needed_bytes - account.granted_bytes
        if more_bytes <= 0:
            return 0
        short_bytes = max(0, more_bytes - self.free_bytes)
        if not short_bytes:
            self._regrant(account, needed_bytes)
        return short_bytes

    def release(self, account: Account) -> None:
        self._regrant(account, 0)

    def move(self, account: Account, to: Account, needed_bytes: int) -> int:
        """Grant `to` this much in the place of what `account` has; return the bytes lacking.

        If some are lacking, nothing has changed.
        """
        short_bytes = max(0, needed_bytes - account.granted_bytes - self.free_bytes)
        if not short_bytes:
            self.release(account)
            self._regrant(to, needed_bytes)
        return short_bytes

    def note_loaded(self, account: Account, used_bytes: int) -> int:
        """Record a worker's measured memory at rest, context included; return the bytes lacking."""
        account.resting_bytes = used_bytes
        return self._grant_measured(account)

    def note_ran(self, account: Account, peak_bytes: int) -> int:
        """Record a worker's measured peak of total memory in a run; return the bytes lacking."""
        account.peak_bytes = max(peak_bytes, account.peak_bytes or 0)
        return self._grant_measured(account)

    def set_aside(self, total_bytes: int) -> int:
        """Keep `total_bytes` for what is in no account; return the bytes lacking."""
        short_bytes = max(0, total_bytes - self._set_aside_bytes - self.free_bytes)
        if not short_bytes:
            self._set_aside_bytes = total_bytes
        return short_bytes

    def reconcile(self, used_bytes: int, device_bytes: int, ours_bytes: int | None = None) -> int:
        """Compare with the device's total use; return the bytes of it that other programs use.

        What was not granted of these is withheld. `ours_bytes` is the measured use of this node's
        workers; None means all bytes granted. `device_bytes` may exceed this ledger's capacity.
        """
        ours = self.granted_bytes if ours_bytes is None else ours_bytes
        foreign_bytes = max(0, used_bytes - ours)
        missing_bytes = max(0, self.capacity_bytes - (device_bytes - foreign_bytes))
        self._withheld_bytes = min(missing_bytes, self.capacity_bytes - self.granted_bytes)
        return missing_bytes

    def _grant_measured(self, account: Account) -> int:
        needed_bytes = account.measured_bytes
        if needed_bytes < account.granted_bytes and account.peak_bytes is not None:
            self._regrant(account, needed_bytes)
        return self.grow(account, needed_bytes)

    def _regrant(self, account: Account, granted_bytes: int) -> None:
        self._granted_bytes += granted_bytes - account.granted_bytes
        account.granted_bytes = granted_bytes


@dataclass(slots=True, eq=False)
class SharedContext:
    """What a tenant's process takes beside what its models hold between calls.

    The memory of a call is free again when the call ends: a process of many models needs it as
    often as calls may overlap, and not for each model.
    """

    tenant: str
    context_bytes: int
    models: int = 0
    _calls: dict[ModelId, int] = field(default_factory=dict)  # the most that a call took

    def bytes(self, calls_at_once: int) -> int:
        return self.context_bytes + self.for_calls_bytes(calls_at_once)

    def for_calls_bytes(self, calls_at_once: int) -> int:
        """The most that so many calls of different models take at once, as far as is known."""
        return sum(sorted(self._calls.values(), reverse=True)[:calls_at_once])

    def ran(self, model: ModelId, call_bytes: int) -> None:
        """A call of this model took so much beyond what the model holds."""
        self._calls[model] = max(self._calls.get(model, 0), call_bytes)

    def leave(self, model: ModelId) -> None:
        self.models -= 1
        self._calls.pop(model, None)
