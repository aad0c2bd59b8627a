"""What GPU time and memory cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.core.billing.charges import GPU_TIME, KEPT, KEPT_FROM_OTHERS

_GIB = 1 << 30
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Billing:
    """How the bill is kept, and the prices, in `currency`; without prices no cost is shown.

    Hours are kept for two days, then their days for `keep_days`. What was counted is written
    every `write_s`; a crash loses what was counted since. Prices are for one second of a slot (not
    while it was kept and nobody waited), and
    for one GiB for one second: in GPU memory `used` by a lease or `idle`, an empty process's
    (`context`), in a node's memory (`host`) or on its `disk`. `gpu_types` has factors for the
    prices of GPUs of these types.
    """

    write_s: float = 5.0
    keep_days: float = 90.0
    currency: str = ""
    gpu_second: float = 0.0
    used_gib_second: float = 0.0
    idle_gib_second: float = 0.0
    context_gib_second: float = 0.0
    host_gib_second: float = 0.0
    disk_gib_second: float = 0.0
    gpu_types: Mapping[str, float] = field(default_factory=dict)

    @property
    def priced(self) -> bool:
        """Whether anything costs something."""
        return any(self._prices())

    def cost(self, amounts: Sequence[int], gpu_type: str) -> float:
        """What these amounts cost; a slot that was kept from nobody costs nothing."""
        factor = self.gpu_types.get(gpu_type, 1.0)
        paid = list(amounts)
        free_us = amounts[KEPT] - amounts[KEPT_FROM_OTHERS]
        paid[GPU_TIME] = max(0, paid[GPU_TIME] - free_us)
        return factor * sum(
            price * paid[charge] / _MICROSECONDS / (1 if charge == GPU_TIME else _GIB)
            for charge, price in enumerate(self._prices())
        )

    def _prices(self) -> list[float]:
        """By charge, from GPU time to bytes on the disk; what comes behind them costs nothing."""
        return [
            *(self.gpu_second, self.used_gib_second, self.idle_gib_second),
            *(self.context_gib_second, self.host_gib_second, self.disk_gib_second),
        ]
