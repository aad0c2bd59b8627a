"""LitServe, run by its own Python: `litserve_server.py PROGRAM PORT`, until standard input ends.

PROGRAM is `noop`, `computing`, or one of `litserve_batched.py`.
"""

import signal
import sys
import threading

import litserve  # type: ignore[import-not-found]  # installed in an environment of its own
import torch
from litserve.transport import factory  # type: ignore[import-not-found]
from litserve_batched import batched  # type: ignore[import-not-found]  # beside this script
from peer_life import watch  # type: ignore[import-not-found]  # beside this script
from two_layers import scores, two_layers  # type: ignore[import-not-found]  # beside this script

_WORKERS = _API_SERVERS = 2


class EmptyApi(litserve.LitAPI):  # type: ignore[misc]  # whose types are not known here
    """Answers every request alike."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def predict(self, request: object) -> dict[str, str]:
        """Ignore the request."""
        del request
        return {"hello": "hello"}


class ComputingApi(litserve.LitAPI):  # type: ignore[misc]
    """Serves the small model."""

    def setup(self, device: str) -> None:
        """Make the model in this worker."""
        del device
        torch.set_num_threads(1)
        self._model = two_layers()

    def predict(self, request: dict[str, list[float]]) -> dict[str, list[float]]:
        """The scores of one request."""
        return {"scores": scores(self._model, request["numbers"])}


def main() -> None:
    """Serve until the starting process closes standard input."""
    program, port = sys.argv[1], int(sys.argv[2])
    parts, workers = _parts(program)
    server = litserve.LitServer(
        parts,
        accelerator="cpu",
        devices=1,
        workers_per_device=workers,
        fast_queue=True,
    )
    _mend_fast_queue(server)
    ready_url = f"http://127.0.0.1:{port}/health"
    threading.Thread(target=watch, args=(signal.SIGINT, ready_url), daemon=True).start()
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=_API_SERVERS,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
        loop="uvloop",  # fails where it is not installed, as `auto` would not
        http="httptools",
    )


def _mend_fast_queue(server: litserve.LitServer) -> None:
    """What the open fix Lightning-AI/LitServe#752 changes: without it the queue is not used.

    The server passes the kind of transport by a wrong name, and the queue's addresses swapped.
    """
    made = factory.ZMQTransport
    factory.ZMQTransport = lambda frontend, backend: made(backend, frontend)
    server.transport_config = factory.TransportConfig(transport_type="zmq")


def _parts(program: str) -> tuple[list[litserve.LitAPI], int]:
    """What is served, and by how many workers each."""
    if program.startswith("batched:"):
        found: tuple[list[litserve.LitAPI], int] = batched(program)
        return found
    return [EmptyApi() if program == "noop" else ComputingApi()], _WORKERS


if __name__ == "__main__":
    main()
