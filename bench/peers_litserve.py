"""LitServe, run by its own Python: `peers_litserve.py noop PORT`, until standard input ends."""

import os
import signal
import sys
import threading
import time
import urllib.request

import litserve  # type: ignore[import-not-found]  # installed in an environment of its own

_ASK_S = 0.1


class Noop(litserve.LitAPI):  # type: ignore[misc]  # whose types are not known here
    """Does nothing."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def predict(self, said: object) -> dict[str, str]:
        """Whatever was said."""
        del said
        return {"hello": "hello"}


def main() -> None:
    """Serve until whoever started it closes standard input."""
    port = int(sys.argv[2])
    server = litserve.LitServer(Noop(), accelerator="cpu", workers_per_device=1)
    threading.Thread(target=_watch, args=(port,), daemon=True).start()
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)


def _watch(port: int) -> None:
    """Says when it answers; ends it when standard input ends."""
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
