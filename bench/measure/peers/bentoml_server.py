"""BentoML, run by its own Python: `bentoml_server.py PROGRAM PORT`, until standard input ends.

PROGRAM is `noop` or `computing`. `bentoml serve` imports this file for the service of that name.
"""

import sys
from pathlib import Path

import bentoml  # type: ignore[import-not-found]  # installed in an environment of its own
import torch
from peer_life import run_server  # type: ignore[import-not-found]  # beside this script
from two_layers import scores, two_layers  # type: ignore[import-not-found]  # beside this script

_WORKERS = 2
_SETTINGS = {
    "workers": _WORKERS,
    "logging": {"access": {"enabled": False}},
    "metrics": {"enabled": False},
}


@bentoml.service(**_SETTINGS)
class Noop:
    """Answers every request alike."""

    @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
    async def predict(self, numbers: list[float]) -> dict[str, str]:
        """Ignore the request."""
        del numbers
        return {"hello": "hello"}


@bentoml.service(**_SETTINGS)
class Computing:
    """Serves the small model."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = two_layers()

    # A thread for a model that takes 0.1 ms would cost more than the model.
    @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
    async def predict(self, numbers: list[float]) -> dict[str, list[float]]:
        """The scores of one request."""
        return {"scores": scores(self._model, numbers)}


def main() -> None:
    """Serve until the starting process closes standard input."""
    program, port = sys.argv[1:]
    service = {"noop": "Noop", "computing": "Computing"}[program]
    here = str(Path(__file__).resolve().parent)
    command = [sys.executable, "-m", "bentoml", "serve", f"bentoml_server:{service}"]
    run_server(
        [*command, "--working-dir", here, "--host", "127.0.0.1", "--port", port],
        f"http://127.0.0.1:{port}/readyz",
    )


if __name__ == "__main__":
    main()
