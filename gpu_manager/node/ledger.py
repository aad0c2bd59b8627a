"""How much of one GPU's memory each model may use: pure accounting, in bytes."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from cache_manager.model.ids import ModelId


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What the device says is used, beside what was granted.

    `withheld_bytes` are used by other programs and not granted. `short_bytes` are granted to models
    although other programs use them: memory pressure.
    """

    used_bytes: int
    granted_bytes: int
    withheld_bytes: int
    short_bytes: int

    @property
    def drift_bytes(self) -> int:
        """More than 0: more is used than was granted."""
        return self.used_bytes - self.granted_bytes


@dataclass(slots=True)
class _Account:
    granted_bytes: int
    resting_bytes: int = 0  # measured: weights and context
    peaks_bytes: dict[tuple[Hashable, int], int] = field(default_factory=dict)


class Ledger:
    """The memory of one GPU; the sum of what is granted never exceeds its capacity.

    A model may use its limit: the bytes granted to it, and while it is the one that runs, also the
    free ones. The measured peak of a run is granted afterwards, if it still fits.
    """

    def __init__(self, capacity_bytes: int, context_bytes: int = 0) -> None:
        """`context_bytes` are taken by a process before it holds a model."""
        self.capacity_bytes = capacity_bytes
        self.context_bytes = context_bytes
        self._accounts: dict[ModelId, _Account] = {}
        self._granted_bytes = 0  # of all accounts together
        self._set_aside_bytes = 0
        self._withheld_bytes = 0

    @property
    def granted_bytes(self) -> int:
        """Bytes granted to models, and bytes set aside."""
        return self._granted_bytes + self._set_aside_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes neither granted nor withheld."""
        return self.capacity_bytes - self.granted_bytes - self._withheld_bytes

    def __contains__(self, model: ModelId) -> bool:
        return model in self._accounts

    def models(self) -> dict[ModelId, int]:
        """The bytes granted to each model."""
        return {model: account.granted_bytes for model, account in self._accounts.items()}

    def ever_fits(self, needed_bytes: int) -> bool:
        """Whether it would fit if every model left."""
        return needed_bytes <= self.capacity_bytes - self._set_aside_bytes

    def fits(self, needed_bytes: int) -> bool:
        """Whether it fits now."""
        return needed_bytes <= self.free_bytes

    def admit(self, model: ModelId, needed_bytes: int) -> int:
        """Grant a model its memory. The answer is what it lacks: not 0, and nothing is granted."""
        if model in self._accounts:
            return self.grow(model, needed_bytes)
        short_bytes = max(0, needed_bytes - self.free_bytes)
        if not short_bytes:
            self._accounts[model] = _Account(needed_bytes)
            self._granted_bytes += needed_bytes
        return short_bytes

    def grow(self, model: ModelId, needed_bytes: int) -> int:
        """Let a model have at least this. The answer is what it lacks: not 0, and nothing grows."""
        account = self._accounts[model]
        more_bytes = needed_bytes - account.granted_bytes
        if more_bytes <= 0:
            return 0
        short_bytes = max(0, more_bytes - self.free_bytes)
        if not short_bytes:
            self._regrant(account, needed_bytes)
        return short_bytes

    def release(self, model: ModelId) -> int:
        """A model is gone; the bytes that this freed, 0 if it had none."""
        account = self._accounts.pop(model, None)
        if account is None:
            return 0
        self._granted_bytes -= account.granted_bytes
        return account.granted_bytes

    def limit_bytes(self, model: ModelId) -> int:
        """The most that a model may use while it is the one that runs; less once others load."""
        return self._accounts[model].granted_bytes + self.free_bytes

    def loaded(self, model: ModelId, used_bytes: int) -> int:
        """What a worker holds at rest, its context included, was measured; what it lacks."""
        account = self._accounts[model]
        account.resting_bytes = used_bytes
        return self._settle(model, account)

    def ran(self, model: ModelId, program: Hashable, batch: int, peak_bytes: int) -> int:
        """The most that a worker used in a run, all in all, was measured; what it lacks now."""
        account = self._accounts[model]
        key = (program, batch)
        account.peaks_bytes[key] = max(peak_bytes, account.peaks_bytes.get(key, 0))
        return self._settle(model, account)

    def measured_bytes(self, model: ModelId) -> int:
        """The most that was measured of a resident model; 0 before anything was."""
        account = self._accounts[model]
        return max(account.resting_bytes, *account.peaks_bytes.values(), 0)

    def expected_bytes(self, model: ModelId, program: Hashable, batch: int) -> int:
        """What this run took before, or what any took if it is new."""
        account = self._accounts[model]
        return account.peaks_bytes.get((program, batch)) or self.measured_bytes(model)

    def set_aside(self, total_bytes: int) -> int:
        """Keep this much in all for what is no model, as pooled contexts; what it lacks."""
        short_bytes = max(0, total_bytes - self._set_aside_bytes - self.free_bytes)
        if not short_bytes:
            self._set_aside_bytes = total_bytes
        return short_bytes

    def reconcile(
        self, used_bytes: int, device_bytes: int, ours_bytes: int | None = None
    ) -> Reconciled:
        """Compare with what the device says is used by everybody, and withhold what others have.

        `ours_bytes` is what our own processes are seen to use; where that is not known, they are
        taken to use all that was granted. `device_bytes` may be more than this ledger's capacity.
        """
        ours = self.granted_bytes if ours_bytes is None else ours_bytes
        foreign_bytes = max(0, used_bytes - ours)
        missing_bytes = max(0, self.capacity_bytes - (device_bytes - foreign_bytes))
        self._withheld_bytes = min(missing_bytes, self.capacity_bytes - self.granted_bytes)
        short_bytes = missing_bytes - self._withheld_bytes
        return Reconciled(used_bytes, self.granted_bytes, self._withheld_bytes, short_bytes)

    def _settle(self, model: ModelId, account: _Account) -> int:
        """What was measured replaces what was believed, as it does in the scheduler's core."""
        needed_bytes = self.measured_bytes(model)
        if needed_bytes < account.granted_bytes and account.peaks_bytes:
            self._regrant(account, needed_bytes)
        return self.grow(model, needed_bytes)

    def _regrant(self, account: _Account, granted_bytes: int) -> None:
        self._granted_bytes += granted_bytes - account.granted_bytes
        account.granted_bytes = granted_bytes
