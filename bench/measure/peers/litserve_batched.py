"""LitServe's programs with batches: `batched:WORKERS:THREADS:WAIT_S:MOST`, each model at a path."""

import litserve  # type: ignore[import-not-found]  # installed in an environment of its own
import torch
from four_models import NAMES, answers, made  # type: ignore[import-not-found]  # beside this file


class BatchedApi(litserve.LitAPI):  # type: ignore[misc]  # whose types are not known here
    """Serves one model to batches; LitServe makes lists of requests, and takes lists of answers."""

    def __init__(self, name: str, threads: int, most: int, wait_s: float) -> None:
        super().__init__(max_batch_size=most, batch_timeout=wait_s, api_path=f"/{name}")
        self._name, self._threads = name, threads

    def setup(self, device: str) -> None:
        """Make the model in this worker."""
        del device
        torch.set_num_threads(self._threads)
        self._model = made(self._name)

    def batch(self, inputs: list[dict[str, str]]) -> list[dict[str, str]]:
        """Keep the list."""
        return inputs

    def predict(self, requests: list[dict[str, str]]) -> list[dict[str, list[float]]]:
        """Answer all of them by one run."""
        found: list[dict[str, list[float]]] = answers(self._model, self._name, requests)
        return found

    def unbatch(self, output: list[dict[str, list[float]]]) -> list[dict[str, list[float]]]:
        """Keep the list."""
        return output


def batched(program: str) -> tuple[list[litserve.LitAPI], int]:
    """The program's parts, and the number of workers of each."""
    _, workers, threads, wait_s, most = program.split(":")
    parts = [BatchedApi(name, int(threads), int(most), float(wait_s)) for name in NAMES]
    return parts, int(workers)
