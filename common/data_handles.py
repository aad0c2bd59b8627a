"""Handles of data that functions pass to each other, `NODE.SECRET`: who has one may use the data.

The node is named so that a request can be placed near its data. The secret cannot be guessed; a
handle is of use only to functions of the tenant that put the data. Its last characters say which
worker has the data, if one has: a function that is connected to it need ask nobody else.
"""

import re
import secrets

SECRET_BYTES, _TAG_BYTES = 21, 3  # in base64: 28 and 4 characters
_TAG_CHARACTERS = 4
# A node's name is 253 characters at most, a secret has 32.
LONGEST = 286
_HANDLE = re.compile(r"([A-Za-z0-9._-]{1,253})\.[A-Za-z0-9_-]{32}")
_NODE = re.compile(r"[A-Za-z0-9._-]{1,253}")


def new_handle(node: str, worker: str = "") -> str:
    """Return a handle of data that this node will have, or this worker of it has.

    A worker's name begins with random characters.
    """
    if not _NODE.fullmatch(node):
        raise ValueError(f"node {node!r:.300}: use letters, digits, '.', '_' and '-' in its name")
    before, behind = around_secret(node, worker)
    behind = behind or secrets.token_urlsafe(_TAG_BYTES)
    return f"{before}{secrets.token_urlsafe(SECRET_BYTES)}{behind}"


def around_secret(node: str, worker: str) -> tuple[str, str]:
    """Return what stands before and behind the secret: that is random, of `SECRET_BYTES`."""
    return f"{node}.", worker[:_TAG_CHARACTERS]


def is_of_worker(handle: str, worker: str) -> bool:
    """Whether this may be a handle that was made for data of this worker."""
    return handle.endswith(worker[:_TAG_CHARACTERS])


def node_of(handle: str) -> str | None:
    """Return the node that a handle names; None for what is no handle."""
    match = _HANDLE.fullmatch(handle)
    return None if match is None else match[1]
