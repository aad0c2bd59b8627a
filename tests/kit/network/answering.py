"""HTTP servers that give everybody the same answers."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any


@contextmanager
def answering(status: int, answer: object) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything so, and notes what it was asked."""
    asked: list[str] = []

    def answer_of(path: str, authorization: str | None) -> object:
        asked.append(f"{path} {authorization}")
        return answer

    with _serving(status, answer_of) as url:
        yield url, asked


@contextmanager
def answering_each(answers: Mapping[str, object]) -> Iterator[str]:
    """A server with an answer for each path."""
    with _serving(200, lambda path, _: answers[path]) as url:
        yield url


@contextmanager
def _serving(status: int, answer_of: Callable[[str, str | None], object]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(answer_of(self.path, self.headers["Authorization"])).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET  # noqa: N815 - http.server's names

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
