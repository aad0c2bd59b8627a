"""One model's account in the pool, as the memory that it takes of an emulated GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_manager.worker.device.pool.pool_floor import SharedPool


class PooledMemory:
    """What one model has of a pool that other models of the process use as well."""

    gives_back = True

    def __init__(self, shared: SharedPool, model: int) -> None:
        self._shared = shared
        self._pool = shared.pool
        self._model = model

    def used_bytes(self) -> int:
        """The model's blocks, to the byte."""
        return self._pool.used_by(self._model)

    def limit(self, most_bytes: int) -> None:
        """Have the pool refuse the model more."""
        self._pool.limit(self._model, most_bytes)

    def note_weights(self, weights_bytes: int) -> None:
        """Count weights among what the models may have together."""
        self._shared.note_weights(self._model, weights_bytes)

    def lift(self) -> None:
        """Close the model's account."""
        self._shared.note_weights(self._model, 0)
        self._pool.forget(self._model)

    def watch(self) -> None:
        """Begin anew with what the model has now."""
        self._pool.watch(self._model)

    def peak_bytes(self) -> int:
        """The most that the model had, to the byte."""
        return self._pool.peak_of(self._model)

    def release(self) -> None:
        """Give all free pages of the pool back."""
        self._shared.shrink_to(0)

    def after_call(self) -> None:
        """Give free pages back, but for those that the calls of the last seconds used."""
        self._shared.shrink()

    def adopt_thread(self) -> None:
        """Charge the model with what this thread takes."""
        self._pool.adopt_thread(self._model)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Charge the model with what threads without a model take, while no other one computes."""
        with self._pool.of(self._model):
            yield
