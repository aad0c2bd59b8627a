"""How much of a pool stays mapped between calls: what was used lately; after a while nothing."""

import threading
import time

from gpu_manager.worker.device.pool.memory_pool import MemoryPool
from gpu_manager.worker.device.process_memory import trim_malloc

_WINDOW_S = 1.0


class PoolFloor:
    """The most that was in use in this window of time and the one before; pure."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self.window_s = window_s
        self._ends_s = float("-inf")
        self._before_bytes = self._now_bytes = 0

    def used(self, used_bytes: int, now_s: float) -> int:
        """Note a use; return the floor."""
        self._advance(now_s)
        self._now_bytes = max(self._now_bytes, used_bytes)
        return max(self._before_bytes, self._now_bytes)

    def at(self, now_s: float) -> int:
        """The floor without another use."""
        self._advance(now_s)
        return max(self._before_bytes, self._now_bytes)

    def _advance(self, now_s: float) -> None:
        if now_s < self._ends_s:
            return
        is_next = now_s < self._ends_s + self.window_s
        self._before_bytes = self._now_bytes if is_next else 0
        self._now_bytes = 0
        self._ends_s = now_s + self.window_s


class SharedPool:
    """A pool that shrinks after calls to its floor, and to nothing when no call comes for long.

    Then malloc gives back what the threads of many models left in its arenas, too.
    """

    def __init__(self, pool: MemoryPool) -> None:
        """Install the pool: all tensors of the process come from it from now on."""
        self.pool = pool
        self._floor = PoolFloor()
        self._lock = threading.Lock()
        self._used = threading.Event()
        self._together_bytes = 0
        self._weights_bytes: dict[int, int] = {}
        pool.install()
        threading.Thread(target=self._shrink_when_idle, name="pool", daemon=True).start()

    def shrink(self) -> None:
        """After a call: keep only as much as the calls of the last seconds used at once."""
        with self._lock:
            floor_bytes = self._floor.used(self.pool.take_peak(), time.monotonic())
            self.pool.trim(max(0, floor_bytes - self.pool.used_bytes))
        self._used.set()

    def limit_together(self, most_bytes: int) -> None:
        """Let all models have no more than this at once, their weights included."""
        with self._lock:
            self._together_bytes = most_bytes
            self._limit()

    def note_weights(self, model: int, weights_bytes: int) -> None:
        """Count this model's weights, which lie outside, among what all may have."""
        with self._lock:
            self._weights_bytes[model] = weights_bytes
            if not weights_bytes:
                del self._weights_bytes[model]
            if self._together_bytes:
                self._limit()

    def _limit(self) -> None:
        outside_bytes = sum(self._weights_bytes.values())
        self.pool.limit_together(max(0, self._together_bytes - outside_bytes))

    def shrink_to(self, keep_bytes: int) -> None:
        """Give free pages back, whatever was used."""
        with self._lock:
            self.pool.trim(keep_bytes)

    def _shrink_when_idle(self) -> None:
        while True:
            self._used.wait()
            self._used.clear()
            time.sleep(self._floor.window_s)
            with self._lock:
                floor_bytes = self._floor.at(time.monotonic())
                self.pool.trim(max(0, floor_bytes - self.pool.used_bytes))
            if floor_bytes:
                self._used.set()  # look again: the floor falls
            else:
                trim_malloc()
