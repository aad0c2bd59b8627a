"""mosec, run by its own Python: `mosec_server.py PROGRAM PORT`, until standard input ends.

PROGRAM is `noop` or `computing`.
"""

import json
import signal
import sys
import threading

import mosec  # type: ignore[import-not-found]  # installed in an environment of its own
import torch
from peer_life import watch  # type: ignore[import-not-found]  # beside this script
from two_layers import FEATURES, scores, two_layers  # type: ignore[import-not-found]  # beside this script

_WORKERS = 2


class EmptyWorker(mosec.Worker):  # type: ignore[misc]  # whose types are not known here
    """Answers every request alike."""

    def forward(self, data: object) -> dict[str, str]:
        """Ignore the request."""
        del data
        return {"hello": "hello"}


class ComputingWorker(mosec.Worker):  # type: ignore[misc]
    """Serves the small model."""

    def __init__(self) -> None:
        """Make the model in this worker."""
        super().__init__()
        torch.set_num_threads(1)
        self._model = two_layers()

    def forward(self, data: dict[str, list[float]]) -> dict[str, list[float]]:
        """The scores of one request."""
        return {"scores": scores(self._model, data["numbers"])}


def main() -> None:
    """Serve until the starting process closes standard input."""
    program, port = sys.argv[1], int(sys.argv[2])
    # mosec reads its settings here.
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    server = mosec.Server()
    server.append_worker(EmptyWorker if program == "noop" else ComputingWorker, num=_WORKERS)
    # A call, as mosec answers one only once its workers are there.
    call = f"http://127.0.0.1:{port}/inference", json.dumps({"numbers": FEATURES * [0.0]}).encode()
    threading.Thread(target=watch, args=(signal.SIGTERM, *call), daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
