"""The memory of one GPU that models and empty processes are granted: pure accounting, in bytes."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_manager.model.ids import ModelId


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The use that the device reports, compared with the bytes granted.

    `withheld_bytes` are used by other programs and not granted. `short_bytes` are granted to models
    although other programs use them: memory pressure.
    """

    withheld_bytes: int
    short_bytes: int


class ProcessUse(NamedTuple):
    """One worker process: what it takes by measure, and what it was granted."""

    pid: int
    measured_bytes: int
    granted_bytes: int

    @property
    def over_bytes(self) -> int:
        return max(0, self.measured_bytes - self.granted_bytes)


@dataclass(slots=True)
class _Account:
    granted_bytes: int
    resting_bytes: int = 0  # measured: weights and context
    peak_bytes: int | None = None  # measured: the most of all runs, None before the first


class Ledger:
    """The memory of one GPU; the sum of the bytes granted never exceeds its capacity.

    A model may use its limit: the bytes granted to the model and, while it runs, the free bytes.
    The measured peak of a run is granted afterwards if it still fits. A context is what a model has
    left when its process stays: it is known by any value that stands for that one process.
    """

    def __init__(self, capacity_bytes: int, context_bytes: int = 0) -> None:
        """`context_bytes` is the memory of a process before it holds a model."""
        self.capacity_bytes = capacity_bytes
        self.context_bytes = context_bytes
        self._accounts: dict[ModelId, _Account] = {}
        self._contexts: dict[Hashable, int] = {}
        self._granted_bytes = 0  # of all accounts and contexts together
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

    def __contains__(self, model: ModelId) -> bool:
        return model in self._accounts

    def models(self) -> dict[ModelId, int]:
        return {model: account.granted_bytes for model, account in self._accounts.items()}

    def contexts(self) -> dict[Hashable, int]:
        return dict(self._contexts)

    def ever_fits(self, needed_bytes: int) -> bool:
        """Whether this many bytes would fit if every model left."""
        return needed_bytes <= self.capacity_bytes - self._set_aside_bytes

    def fits(self, needed_bytes: int) -> bool:
        return needed_bytes <= self.free_bytes

    def admit(self, model: ModelId, needed_bytes: int) -> int:
        """Grant a model its memory; return the bytes lacking, in which case nothing is granted."""
        if model in self._accounts:
            return self.grow(model, needed_bytes)
        short_bytes = max(0, needed_bytes - self.free_bytes)
        if not short_bytes:
            self._accounts[model] = _Account(needed_bytes)
            self._granted_bytes += needed_bytes
        return short_bytes

    def grow(self, model: ModelId, needed_bytes: int) -> int:
        """Grant a model at least this much; return the bytes lacking, if it cannot be granted."""
        account = self._accounts[model]
        more_bytes = needed_bytes - account.granted_bytes
        if more_bytes <= 0:
            return 0
        short_bytes = max(0, more_bytes - self.free_bytes)
        if not short_bytes:
            self._regrant(account, needed_bytes)
        return short_bytes

    def release(self, model: ModelId) -> int:
        """Release a model's memory; return the bytes freed, 0 if none were granted."""
        account = self._accounts.pop(model, None)
        if account is None:
            return 0
        self._granted_bytes -= account.granted_bytes
        return account.granted_bytes

    def leave(self, model: ModelId, context: Hashable, context_bytes: int) -> int:
        """Turn a model's memory into that of the context it has left; return the bytes lacking.

        If some are lacking, nothing has changed.
        """
        freed_bytes = self._accounts[model].granted_bytes
        short_bytes = max(0, context_bytes - freed_bytes - self.free_bytes)
        if not short_bytes:
            self.release(model)
            self._contexts[context] = context_bytes
            self._granted_bytes += context_bytes
        return short_bytes

    def enter(self, context: Hashable, model: ModelId) -> None:
        """Turn a context's memory into that of a model that its process takes."""
        assert model not in self._accounts, f"{model} has memory already"
        self._accounts[model] = _Account(self._contexts.pop(context))

    def release_context(self, context: Hashable) -> int:
        """Release a context's memory; return the bytes freed, 0 if there is no such context."""
        freed_bytes = self._contexts.pop(context, 0)
        self._granted_bytes -= freed_bytes
        return freed_bytes

    def of_context(self, context: Hashable) -> int:
        """Return a context's bytes; before they are measured, those of any context here."""
        return self._contexts.get(context, self.context_bytes)

    def limit_bytes(self, model: ModelId) -> int:
        """Return the bytes that a model may use while it runs; this falls when others load."""
        return self._accounts[model].granted_bytes + self.free_bytes

    def loaded(self, model: ModelId, used_bytes: int) -> int:
        """Record a worker's measured memory at rest, context included; return the bytes lacking."""
        account = self._accounts[model]
        account.resting_bytes = used_bytes
        return self._grant_measured(model, account)

    def ran(self, model: ModelId, peak_bytes: int) -> int:
        """Record a worker's measured peak of total memory in a run; return the bytes lacking."""
        account = self._accounts[model]
        account.peak_bytes = max(peak_bytes, account.peak_bytes or 0)
        return self._grant_measured(model, account)

    def measured_bytes(self, model: ModelId) -> int:
        """Return the highest measurement of a resident model; 0 if there is none."""
        account = self._accounts[model]
        return max(account.resting_bytes, account.peak_bytes or 0)

    def set_aside(self, total_bytes: int) -> int:
        """Reserve `total_bytes` for uses such as pooled contexts; return the bytes lacking."""
        short_bytes = max(0, total_bytes - self._set_aside_bytes - self.free_bytes)
        if not short_bytes:
            self._set_aside_bytes = total_bytes
        return short_bytes

    def reconcile(
        self, used_bytes: int, device_bytes: int, ours_bytes: int | None = None
    ) -> Reconciled:
        """Compare with the device's total use, and withhold the memory of other programs.

        `ours_bytes` is the measured use of this node's workers; None means all bytes granted.
        `device_bytes` may exceed this ledger's capacity.
        """
        ours = self.granted_bytes if ours_bytes is None else ours_bytes
        foreign_bytes = max(0, used_bytes - ours)
        missing_bytes = max(0, self.capacity_bytes - (device_bytes - foreign_bytes))
        self._withheld_bytes = min(missing_bytes, self.capacity_bytes - self.granted_bytes)
        short_bytes = missing_bytes - self._withheld_bytes
        return Reconciled(self._withheld_bytes, short_bytes)

    def _grant_measured(self, model: ModelId, account: _Account) -> int:
        needed_bytes = self.measured_bytes(model)
        if needed_bytes < account.granted_bytes and account.peak_bytes is not None:
            self._regrant(account, needed_bytes)
        return self.grow(model, needed_bytes)

    def _regrant(self, account: _Account, granted_bytes: int) -> None:
        self._granted_bytes += granted_bytes - account.granted_bytes
        account.granted_bytes = granted_bytes


@dataclass(slots=True)
class SharedContext:
    """What a tenant's process takes beside what its models hold between calls.

    The memory of a call is free again when the call ends: a process of many models needs it as
    often as calls may overlap, and not for each model.
    """

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
