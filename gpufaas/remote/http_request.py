"""One HTTP request to a server elsewhere, on a connection of its own."""

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gpufaas.errors import CommandError
from gpufaas.options.http_url import HttpUrl

# Requests that take longer are given up.
TIMEOUT_S = 10.0


class NoAnswer(CommandError):
    """The server did not answer, or broke off its answer; another server may answer.

    `received`: it may have read the request, and may do what it says.
    """

    def __init__(self, why: str, *, received: bool = False) -> None:
        self.received = received
        super().__init__(why)


@contextmanager
def open_response(
    server: HttpUrl,
    what: str,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[http.client.HTTPResponse]:
    """The response, to be read within the context; NoAnswer as soon as the connection fails.

    `what` names the server in the error; `timeout_s` is the longest silence.
    """
    kind = http.client.HTTPSConnection if server.secure else http.client.HTTPConnection
    connection = kind(server.netloc, timeout=timeout_s)
    received = False
    try:
        connection.connect()
        received = True
        connection.request(method, server.path.rstrip("/") + path, body, dict(headers or {}))
        yield connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        why = f"no {what} answers at {server}: {error}"
        raise NoAnswer(why, received=received) from error
    finally:
        connection.close()
