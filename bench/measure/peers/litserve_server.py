"""LitServe, run by its own Python: `litserve_server.py noop PORT`, until standard input ends."""

import os
import signal
import sys
import threading
import time
import urllib.request

import litserve  # type: ignore[import-not-found]  # installed in an environment of its own

_ASK_S = 0.1


class EmptyApi(litserve.LitAPI):  # type: ignore[misc]  # whose types are not known here
    """Answers every request alike."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def predict(self, request: object) -> dict[str, str]:
        """Ignore the request."""
        del request
        return {"hello": "hello"}


def main() -> None:
    """Serve until the starting process closes standard input."""
    port = int(sys.argv[2])
    server = litserve.LitServer(EmptyApi(), accelerator="cpu", workers_per_device=1)
    threading.Thread(target=_watch, args=(port,), daemon=True).start()
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)


def _watch(port: int) -> None:
    """Print `ready` once the server answers; end the server when standard input ends."""
    while not _answers(port):
        time.sleep(_ASK_S)
    print("ready", flush=True)
    while os.read(0, 1024):  # `sys.stdin` has a lock, with which the server's children were forked
        pass
    os.kill(os.getpid(), signal.SIGINT)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
            return bool(answer.read() == b"ok")
    except OSError:
        return False


if __name__ == "__main__":
    main()
