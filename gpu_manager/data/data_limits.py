"""How much data functions may have put, and for how long: for all tenants and for each."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DataLimits:
    """The bounds of a node's data.

    Data beyond `memory_bytes` goes to disk, up to `disk_bytes`; more is refused. One tenant has at
    most `tenant_bytes` and `most_of_a_tenant` pieces, wherever they lie. Data whose function names
    no lifetime lives for `lifetime_s`.
    """

    memory_bytes: int
    disk_bytes: int = 0
    tenant_bytes: int = 0  # 0: half of all
    most: int = 4096
    most_of_a_tenant: int = 1024
    lifetime_s: float = 300.0
    most_lifetime_s: float = 3600.0
    free_s: float = 10.0  # that memory waits to be used again by its tenant

    @property
    def bytes_of_a_tenant(self) -> int:
        """The most bytes of one tenant."""
        return self.tenant_bytes or (self.memory_bytes + self.disk_bytes) // 2
