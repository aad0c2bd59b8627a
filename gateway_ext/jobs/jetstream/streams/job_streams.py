"""The two streams of a queue: their names, subjects and creation."""

from typing import Any, NamedTuple

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from gateway_ext.errors import QueueAway
from gateway_ext.jobs.jetstream.connection.nats_requests import (
    FAILURES,
    NatsRequests,
    describe,
    is_full,
)
from gateway_ext.jobs.queue.job_values import JobNumber

# Records are small: this is for half a million of them.
_RECORDS_BYTES = 1 << 30
_LEAST_BYTES = 1 << 18
_HALF, _QUARTER = 2, 4


class StreamNames:
    """Names of streams and subjects with one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.jobs = f"{prefix}_jobs"
        self.parts = f"{prefix}_parts"
        self.all_jobs = f"{prefix}.jobs.>"
        self.all_parts = f"{prefix}.parts.>"

    def call(self, key: str) -> str:
        """The subject of a waiting or claimed job's record."""
        return f"{self._prefix}.jobs.call.{key}"

    def dead(self, number: JobNumber) -> str:
        """The subject of a dead letter's record."""
        return f"{self._prefix}.jobs.dead.{number}"

    def gateway(self, gateway: str) -> str:
        """The subject of a gateway's heartbeats."""
        return f"{self._prefix}.jobs.gateway.{gateway}"

    def part(self, uid: str, name: str) -> str:
        """The subject of one part of a job."""
        return f"{self._prefix}.parts.{uid}.{name}"

    def all_parts_of(self, uid: str) -> str:
        """The subjects of all parts of a job."""
        return f"{self._prefix}.parts.{uid}.>"

    def uid_of(self, subject: str) -> str:
        """The job identity in the subject of a part."""
        return subject.rsplit(".", 2)[-2]


class StreamsMade(NamedTuple):
    """When the stream of records was created, and the size of that of parts; -1: unlimited."""

    created: str
    parts_bytes: int


async def ensure(
    wire: NatsRequests, names: StreamNames, replicas: int, parts_bytes: int
) -> StreamsMade:
    """Create the streams that do not exist; existing ones are not changed.

    Both have limits, so that bodies never fill the servers to a point where no job could be claimed
    or ended. If the servers have less space than configured, the limits are lower.
    """
    usual = stream_config(replicas)
    jobs = usual.evolve(name=names.jobs, subjects=[names.all_jobs], max_msgs_per_subject=1)
    parts = usual.evolve(name=names.parts, subjects=[names.all_parts], allow_direct=True)
    made = await ensure_stream(wire, jobs, _RECORDS_BYTES, _QUARTER)
    found = await ensure_stream(wire, parts, parts_bytes, _HALF)
    return StreamsMade(str(made["created"]), int(found["config"].get("max_bytes", -1)))


def stream_config(replicas: int) -> StreamConfig:
    """What all our streams are; a full one refuses messages, it never discards old ones."""
    return StreamConfig(
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        num_replicas=replicas,
    )


async def ensure_stream(
    wire: NatsRequests, config: StreamConfig, most_bytes: int, less: int
) -> dict[str, Any]:
    """Create the stream if it does not exist, `less` times smaller until the servers have space."""
    found = await wire.ask(f"STREAM.INFO.{config.name}", {})
    while not found:
        if most_bytes < _LEAST_BYTES:
            raise QueueAway(f"the servers have no space for the stream {config.name}")
        try:
            await wire.client.jetstream().add_stream(config.evolve(max_bytes=most_bytes))
        except FAILURES as error:
            if not is_full(error):
                # Another gateway may be creating it; the next connection finds it.
                why = f"the stream {config.name} cannot be created: {describe(error)}"
                raise QueueAway(why) from error
            most_bytes //= less
        else:
            found = await wire.ask(f"STREAM.INFO.{config.name}", {})
    return found
