"""What a person can choose about a queue on NATS JetStream, and how patient the gateway is."""

import re
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.errors import BadRequest

SCHEMES = ("nats://", "tls://")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True)
class JetStreamSettings:
    """Where the servers are, who we are to them, and what the streams are called.

    `servers` are `nats://HOST:PORT` or `tls://HOST:PORT`. With a `user` the `password_file` holds
    its password, without one a token. `replicas` says on how many servers a job is before it is
    accepted. Streams and subjects begin with `prefix`: gateways with the same one share their jobs.

    A gateway says every `beat_s` that it lives. What it had claimed is anybody's once it has said
    nothing for `lease_s`.
    """

    servers: tuple[str, ...]
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    replicas: int = 1
    prefix: str = "gpufaas"

    beat_s: float = 5.0
    lease_s: float = 20.0
    connect_s: float = 5.0
    answer_s: float = 5.0
    # How long a body's parts may lie without a job that has them, and how long the mark of a job
    # that ended is kept for the other gateways to see.
    orphan_s: float = 900.0
    mark_s: float = 60.0


def servers_in(text: str) -> tuple[str, ...]:
    """The addresses in `nats://a:4222,nats://b:4222`; BadRequest where one of them is none."""
    servers = tuple(one.strip() for one in text.split(","))
    for server in servers:
        rest = next((server.removeprefix(one) for one in SCHEMES if server.startswith(one)), "")
        if not rest or "@" in rest:
            why = "sqlite, or nats://HOST:PORT[,...] without credentials, is wanted"
            raise BadRequest(f"queue: {why}")
    return servers


def check(settings: JetStreamSettings) -> None:
    """BadRequest where a gateway cannot start so."""
    if not _NAME.fullmatch(settings.prefix):
        raise BadRequest(f"queue_prefix: {settings.prefix!r} is not of letters, digits, - and _")
    if not 1 <= settings.replicas <= 5:  # noqa: PLR2004 - what JetStream takes
        raise BadRequest(f"queue_replicas: {settings.replicas} is not from 1 to 5")
    if settings.user and not settings.password_file:
        raise BadRequest("queue_user: queue_password_file is missing")
    if bool(settings.cert_file) != bool(settings.key_file):
        raise BadRequest("queue_cert_file, queue_key_file: both, or none")
    files = (settings.password_file, settings.ca_file, settings.cert_file, settings.key_file)
    for name in filter(None, files):
        if not Path(name).is_file():
            raise BadRequest(f"queue: there is no file {name}")
