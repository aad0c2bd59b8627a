"""Says by its exit status whether a part of gpufaas is up: `healthy.py http://HOST:PORT/readyz`.

A URL has to answer with 200; at a socket (`healthy.py unix:/path`) somebody takes the connection.
"""

import http.client
import socket
import sys
from urllib.parse import urlsplit

_TIMEOUT_S = 3.0


def trouble(target: str) -> str:
    """Why it is not up; empty where it is."""
    try:
        if target.startswith("unix:"):
            _connect(target.removeprefix("unix:"))
            return ""
        status = _status(target)
    except (OSError, http.client.HTTPException) as error:
        return f"{target}: {error}"
    return "" if status == http.client.OK else f"{target}: {status}"


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(path)


def _status(url: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status
    finally:
        connection.close()


if __name__ == "__main__":
    found = [said for target in sys.argv[1:] if (said := trouble(target))]
    sys.exit("; ".join(found) or 0)
