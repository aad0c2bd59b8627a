"""What a caller gets for a request."""

from dataclasses import dataclass

from scheduler.model.values import Placement


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease: where to use it, and which token to present there.

    `addresses` are those of the node's GPU manager; `token` is for the header `X-Gpu-Lease`.
    """

    placement: Placement
    term: int
    addresses: tuple[str, ...]
    token: str

    def header_lines(self) -> tuple[bytes, ...]:
        """The lines of an HTTP request's head that pass the lease to a function."""
        addresses = ",".join(self.addresses).encode("latin-1")
        token = self.token.encode("latin-1")
        return (b"x-gpu-address: ", addresses, b"\r\nx-gpu-lease: ", token, b"\r\n")
