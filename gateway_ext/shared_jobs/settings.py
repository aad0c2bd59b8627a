"""Settings of the queue on NATS JetStream."""

import re
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.errors import BadRequest

SCHEMES = ("nats://", "tls://")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True)
class JetStreamSettings:
    """Servers, credentials, the names of streams, and time-outs."""

    servers: tuple[str, ...]  # nats://HOST:PORT or tls://HOST:PORT
    user: str = ""
    password_file: str = ""  # of the user; without one it holds a token
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    replicas: int = 1  # how many servers store a job before it is accepted
    prefix: str = "gpufaas"  # of streams and subjects; who has the same one shares jobs
    beat_s: float = 5.0  # the pause between two heartbeats of a gateway
    lease_s: float = 20.0  # its claims are released after this time without one
    connect_s: float = 5.0
    answer_s: float = 5.0
    # How long parts may exist without a job, and how long the mark of a job that ended stays: for
    # the other gateways, and until a nats-server 2.9 has written down, once a minute, what the mark
    # replaced. Killed before that, the server has the record again.
    orphan_s: float = 900.0
    mark_s: float = 120.0


def servers_in(text: str) -> tuple[str, ...]:
    """The addresses in `nats://a:4222,nats://b:4222`; BadRequest where one is invalid."""
    servers = tuple(server.strip() for server in text.split(","))
    for server in servers:
        rest = next(
            (server.removeprefix(scheme) for scheme in SCHEMES if server.startswith(scheme)), ""
        )
        if not rest or "@" in rest:
            why = "expected sqlite, or nats://HOST:PORT[,...] without credentials"
            raise BadRequest(f"queue: {why}")
    return servers


def check(settings: JetStreamSettings) -> None:
    """Raise BadRequest where the settings are invalid."""
    if not _NAME.fullmatch(settings.prefix):
        raise BadRequest(
            f"queue_prefix: {settings.prefix!r} may have letters, digits, - and _ only"
        )
    if not 1 <= settings.replicas <= 5:  # noqa: PLR2004 - what JetStream takes
        raise BadRequest(f"queue_replicas: {settings.replicas} is not between 1 and 5")
    if settings.user and not settings.password_file:
        raise BadRequest("queue_user: queue_password_file is missing")
    if bool(settings.cert_file) != bool(settings.key_file):
        raise BadRequest("queue_cert_file and queue_key_file must be set together")
    files = (settings.password_file, settings.ca_file, settings.cert_file, settings.key_file)
    for name in filter(None, files):
        if not Path(name).is_file():
            raise BadRequest(f"queue: there is no file {name}")
