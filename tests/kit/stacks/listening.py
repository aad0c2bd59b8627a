"""A program that is called back, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

from tests.kit.stacks.stack import PATIENCE_S


@dataclass(frozen=True)
class Posted:
    """One request that came."""

    headers: Message
    body: bytes


@dataclass(frozen=True)
class Listening:
    """Where it listens, and what came."""

    url: str
    posted: Queue[Posted]

    def next(self) -> Posted:
        return self.posted.get(timeout=PATIENCE_S)


@contextmanager
def listening() -> Iterator[Listening]:
    """Takes every POST, for as long as the context lasts."""
    posted: Queue[Posted] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.put(Posted(self.headers, body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Listening(f"http://127.0.0.1:{server.server_port}/back", posted)
        finally:
            server.shutdown()
            thread.join()
