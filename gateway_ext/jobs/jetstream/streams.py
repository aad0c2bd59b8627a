"""The streams of a queue: what they are called, how they are made, what stands where."""

from typing import Any, NamedTuple

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from gateway_ext.errors import QueueAway
from gateway_ext.jobs.jetstream.wire import FAILURES, Wire, is_full, told
from gateway_ext.jobs.model import JobNumber

# Records are small: this is for half a million of them.
_RECORDS_BYTES = 1 << 30
_LEAST_BYTES = 1 << 18
_HALF, _QUARTER = 2, 4


class Names:
    """Streams and subjects that begin with one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.jobs = f"{prefix}_jobs"
        self.parts = f"{prefix}_parts"
        self.all_jobs = f"{prefix}.jobs.>"
        self.all_parts = f"{prefix}.parts.>"

    def call(self, key: str) -> str:
        """Where the record of a job that waits or is claimed stands."""
        return f"{self._prefix}.jobs.call.{key}"

    def dead(self, number: JobNumber) -> str:
        """Where that of a dead letter stands."""
        return f"{self._prefix}.jobs.dead.{number}"

    def gateway(self, gateway: str) -> str:
        """Where a gateway says that it lives."""
        return f"{self._prefix}.jobs.gateway.{gateway}"

    def part(self, uid: str, name: str) -> str:
        """Where a part of a job stands."""
        return f"{self._prefix}.parts.{uid}.{name}"

    def all_parts_of(self, uid: str) -> str:
        """All of them."""
        return f"{self._prefix}.parts.{uid}.>"

    def uid_of(self, subject: str) -> str:
        """Whose part it is."""
        return subject.rsplit(".", 2)[-2]


class Made(NamedTuple):
    """When the stream of jobs was made, and what that of parts takes; -1 is no bound."""

    created: str
    parts_bytes: int


async def ensure(wire: Wire, names: Names, replicas: int, parts_bytes: int) -> Made:
    """Have both streams; what is there is not changed.

    Both have bounds, so that the servers are never so full of bodies that no job could be claimed,
    or ended, any more. Servers that have less than is asked for give what they have.
    """
    # Nothing is thrown away unasked: what is too much is refused.
    usual = StreamConfig(
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        num_replicas=replicas,
    )
    jobs = usual.evolve(name=names.jobs, subjects=[names.all_jobs], max_msgs_per_subject=1)
    parts = usual.evolve(name=names.parts, subjects=[names.all_parts])
    made = await _ensure(wire, jobs, _RECORDS_BYTES, _QUARTER)
    found = await _ensure(wire, parts, parts_bytes, _HALF)
    return Made(str(made["created"]), int(found["config"].get("max_bytes", -1)))


async def _ensure(wire: Wire, config: StreamConfig, most_bytes: int, less: int) -> dict[str, Any]:
    found = await wire.ask(f"STREAM.INFO.{config.name}", {})
    while not found:
        if most_bytes < _LEAST_BYTES:
            raise QueueAway(f"the servers have no room for the stream {config.name}")
        try:
            await wire.client.jetstream().add_stream(config.evolve(max_bytes=most_bytes))
        except FAILURES as error:
            if not is_full(error):
                # Another gateway may have made it in this moment, which is as good.
                why = f"the stream {config.name} cannot be made: {told(error)}"
                raise QueueAway(why) from error
            most_bytes //= less
        else:
            found = await wire.ask(f"STREAM.INFO.{config.name}", {})
    return found
