"""BentoML, run by its own Python: `bentoml_server.py PROGRAM PORT`, until standard input ends.

PROGRAM is `noop` or `computing`. `bentoml serve` imports this file for the service of that name.
"""

import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import bentoml  # type: ignore[import-not-found]  # installed in an environment of its own
import torch
from two_layers import scores, two_layers  # type: ignore[import-not-found]  # beside this script

_WORKERS = 2
_ASK_S = 0.1
_STOP_S = 10.0
_OK = 200
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
    service = {"noop": "Noop", "computing": "Computing"}[sys.argv[1]]
    port = int(sys.argv[2])
    here = str(Path(__file__).resolve().parent)
    command = [sys.executable, "-m", "bentoml", "serve", f"bentoml_server:{service}"]
    server = subprocess.Popen(
        [*command, "--working-dir", here, "--host", "127.0.0.1", "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    while not _answers(port):
        if server.poll() is not None:
            sys.exit(f"bentoml serve ended with {server.returncode}")
        time.sleep(_ASK_S)
    print("ready", flush=True)
    sys.stdin.read()
    server.send_signal(signal.SIGINT)
    server.wait(_STOP_S)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
            return bool(answer.status == _OK)
    except OSError:
        return False


if __name__ == "__main__":
    main()
