"""Ports for servers: any loopback port, held until its release, and claims on given ports."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from common.addresses import host_and_port
from common.errors import BadAddress
from gpufaas.errors import CommandError

LOOPBACK = "127.0.0.1"


class HeldPort:
    """A loopback port, reserved for one server until `release`.

    A socket of ours is bound to the port with address reuse allowed, and never listens. The kernel
    then assigns the port to no program that requests any port, for listening or for connecting.
    A server that binds this number with address reuse, as servers do, can listen on it repeatedly.
    """

    def __init__(self, number: int = 0) -> None:
        """Hold this port (OSError if somebody listens there), or by default any free one."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((LOOPBACK, number))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.number}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def keep(self) -> int:
        """Hold it until this process ends; its number."""
        self._socket.detach()
        return self.number

    def release(self) -> None:
        """Make the port available to other programs, after its server has ended."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()


def free_address(
    listen: str, usual: str, whose: str, ports: contextlib.ExitStack, kept: Path
) -> str:
    """The address for a server, claimed as long as `ports` lasts.

    If the usual one is asked for, the port that the file keeps is tried before it. If neither is
    free, it is any other port, which the file keeps: the server has that one at each later start
    while it is free, until the file is removed. CommandError if another address is not free.
    """
    if listen != usual:
        ports.enter_context(claimed_port(listen, whose, "another address"))
        return listen
    number = _kept_number(kept)
    with contextlib.suppress(CommandError, OSError):
        if number:
            ports.enter_context(claimed_port(f"{LOOPBACK}:{number}", whose, "another address"))
            return ports.enter_context(HeldPort(number)).address
    with contextlib.suppress(CommandError):
        ports.enter_context(claimed_port(usual, whose, "another address"))
        return usual
    held = ports.enter_context(HeldPort())
    with contextlib.suppress(OSError):  # a full disk: it is another port next time
        kept.write_text(f"{held.number}\n")
    return held.address


def _kept_number(kept: Path) -> int:
    """The port in the file; 0 if there is none."""
    try:
        return host_and_port(f"{LOOPBACK}:{kept.read_text().strip()}")[1]
    except (OSError, UnicodeDecodeError, BadAddress):
        return 0


@contextlib.contextmanager
def claimed_port(listen: str, whose: str, remedy: str) -> Iterator[None]:
    """Claim a given address; CommandError if another program listens there, or claims the port.

    A server listens some time after its port was found to be free: the claim keeps other stacks,
    which start at the same time, from finding it free as well. The claim is the name of a socket,
    which the kernel forgets when our process ends.
    """
    host, port = host_and_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0gpufaas-port-{port}")
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                problem = f"{listen} is not free for {whose} ({error.strerror}); try {remedy}"
            else:
                problem = f"{listen} cannot be listened at for {whose}: {error.strerror}"
            raise CommandError(problem) from error
        yield
