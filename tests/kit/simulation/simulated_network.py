"""TCP between simulated hosts: delays, cuts, silences and resets, all by one source of chance."""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from socket import AF_INET, socket
from typing import Any, cast

from tests.kit.simulation.simulated_loop import PROGRAM, SimulatedLoop, SimulatedProgram

_FIRST_PORT = 40_000
_LOOK_S = 0.05  # how soon a connection is tried again over a link that carries nothing
_KERNEL_BYTES = 256 << 10
_SPLIT = 0.03  # of all writes arrive in two pieces
_LOOPBACK_S = 0.00005

_END = "end"
_RESET = "reset"
_Item = bytes | str


class SimulatedSocket:
    """As much of a socket as servers and clients ask for."""

    family = AF_INET

    def __init__(self, own: tuple[str, int], peer: tuple[str, int] = ("", 0)) -> None:
        self._own = own
        self._peer = peer

    def getsockname(self) -> tuple[str, int]:
        return self._own

    def getpeername(self) -> tuple[str, int]:
        return self._peer

    def setsockopt(self, *options: int) -> None:
        """The network itself notices what is lost."""

    def getsockopt(self, level: int, option: int, most_bytes: int) -> bytes:
        """Nothing is known of the connection, as in a kernel that does not tell."""
        del level, option, most_bytes
        return b""

    def close(self) -> None:
        """A listener ends with its server."""


def listener(host: str, port: int) -> socket:
    """What a server of this program is given in place of a listening socket."""
    return cast(socket, SimulatedSocket((host, port)))


class SimulatedServer:
    """What listens at one address."""

    def __init__(self, network: "Network", at: tuple[str, int]) -> None:
        self._network = network
        self._at = at

    def close(self) -> None:
        self._network.listens_no_more(self._at, self)

    def is_serving(self) -> bool:
        return True

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""


class SimulatedTransport(asyncio.Transport):
    """One end of a connection; `far` is the other one."""

    far: "SimulatedTransport"

    def __init__(
        self,
        network: "Network",
        program: SimulatedProgram,
        own: tuple[str, int],
        peer: tuple[str, int],
    ) -> None:
        super().__init__({"peername": peer, "sockname": own, "socket": SimulatedSocket(own, peer)})
        self.program = program
        self._network = network
        self._protocol: asyncio.BaseProtocol | None = None
        self._arriving: deque[_Item] = deque()
        self._due = 0
        self._latest_s = 0.0
        self.unread_bytes = 0
        self._paused = False
        self._ended = False  # this end has written its last
        self._closing = False

    # -- what the protocol asks for -----------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._ended or not data:
            return
        content = bytes(data)
        chance = self._network.chance
        if len(content) > 1 and chance.random() < _SPLIT:
            at = chance.randrange(1, len(content))
            self._send(content[:at])
            content = content[at:]
        self._send(content)

    def write_eof(self) -> None:
        if not self._ended:
            self._ended = True
            self._send(_END)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self.write_eof()
            self._close(None)

    def abort(self) -> None:
        if not self._closing:
            self._break()
            self._close(None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._network.loop.call_soon(self.deliver)

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None, "it was connected"
        return self._protocol

    def get_write_buffer_size(self) -> int:
        return max(0, self.far.unread_bytes - _KERNEL_BYTES)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nobody is asked to pause: what is unread is counted only."""

    # -- what the network does ----------------------------------------------------------------

    def deliver(self) -> None:
        """Hand over all that is here, and wait for the rest."""
        while self._due and not self._paused and not self._network.is_blocked(self.far, self):
            self._due -= 1
            item = self._arriving.popleft()
            if isinstance(item, bytes):
                self.unread_bytes -= len(item)
            self._take(item)

    def lose(self) -> None:
        """The program is gone: its kernel closes the connection."""
        if not self._closing:
            self._break()
            self._closing = True
            self._network.forget(self)
        self._protocol = None

    def reset(self) -> None:
        """The connection breaks on its way: what is under way is lost."""
        self._arriving.clear()
        self._due = 0
        self.unread_bytes = 0
        self.arrive(_RESET)

    def arrive(self, item: _Item) -> None:
        """Something is under way to this end."""
        network = self._network
        self._arriving.append(item)
        if isinstance(item, bytes):
            self.unread_bytes += len(item)
        delay_s = network.delay_s(self.far.program.host, self.program.host)
        self._latest_s = max(self._latest_s, network.loop.passed_s + delay_s)
        after_s = self._latest_s - network.loop.passed_s
        network.loop.call_later(after_s, self._is_due, context=self.program.context)

    def _is_due(self) -> None:
        if self._due < len(self._arriving):
            self._due += 1
            self.deliver()

    def _send(self, item: _Item) -> None:
        self.far.arrive(item)

    def _break(self) -> None:
        """A kernel that closes for a program sends what was written, or resets."""
        self._send(_RESET if self._network.chance.random() < 0.5 else _END)
        self._ended = True

    def _take(self, item: _Item) -> None:
        protocol = self._protocol
        if self._closing or protocol is None:
            if isinstance(item, bytes) and not self.far.is_closing():
                self._send(_RESET)
        elif item == _RESET:
            self._close(ConnectionResetError("the other end reset the connection"))
        elif item == _END:
            stays = cast(asyncio.Protocol, protocol).eof_received()
            if not stays:
                self.close()
        else:
            cast(asyncio.Protocol, protocol).data_received(cast(bytes, item))

    def _close(self, error: Exception | None) -> None:
        self._closing = True
        self._network.forget(self)
        self._network.loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)


class Network:
    """All hosts; `latency_s` is the least and the most that a packet takes between two of them."""

    def __init__(self, loop: SimulatedLoop, chance: Random, latency_s: tuple[float, float]) -> None:
        self.loop = loop
        self.chance = chance
        self.latency_s = latency_s
        self._listening: dict[tuple[str, int], _Listening] = {}
        self._ends: dict[SimulatedTransport, None] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._slow_s: dict[tuple[str, str], float] = {}
        self._ports = _FIRST_PORT

    # -- faults -------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Lose all that one host sends to the other, until it is healed; then TCP repeats it."""
        self._blocked.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """Carry again what this host sends to the other."""
        self._blocked.discard((source, target))
        for end in list(self._ends):
            if (end.far.program.host, end.program.host) == (source, target):
                self.loop.call_soon(end.deliver, context=end.program.context)

    def heal_all(self) -> None:
        """Carry everything again, as fast as it ever was."""
        self._slow_s.clear()
        for source, target in sorted(self._blocked):
            self.heal(source, target)

    def slow(self, source: str, target: str, more_s: float) -> None:
        """Delay all between these hosts by up to so much more."""
        self._slow_s[source, target] = self._slow_s[target, source] = more_s

    def reset(self, one: str, other: str) -> None:
        """Break every connection between these hosts."""
        for end in list(self._ends):
            if (end.program.host, end.far.program.host) in ((one, other), (other, one)):
                end.reset()

    # -- for the connections ------------------------------------------------------------------

    def delay_s(self, source: str, target: str) -> float:
        """How long this packet takes."""
        if source == target:
            return _LOOPBACK_S
        more_s = self._slow_s.get((source, target), 0.0)
        return self.chance.uniform(*self.latency_s) + (self.chance.random() * more_s)

    def carries(self, source: str, target: str) -> bool:
        """Whether packets arrive in both directions."""
        return not self._blocked.intersection(((source, target), (target, source)))

    def is_blocked(self, source: SimulatedTransport, target: SimulatedTransport) -> bool:
        """Whether nothing arrives from there."""
        return (source.program.host, target.program.host) in self._blocked

    async def travel(self, source: str, target: str) -> None:
        """Let a packet of something that is no connection pass, as soon as the network lets it."""
        await asyncio.sleep(self.delay_s(source, target))
        while not self.carries(source, target):
            await asyncio.sleep(_LOOK_S)

    def forget(self, end: SimulatedTransport) -> None:
        """This end is closed."""
        self._ends.pop(end, None)

    def listens_no_more(self, at: tuple[str, int], server: SimulatedServer) -> None:
        """Nobody can connect to this server any more."""
        found = self._listening.get(at)
        if found is not None and found.server is server:
            del self._listening[at]

    def serve(
        self, make: Callable[[], asyncio.BaseProtocol], at: tuple[str, int]
    ) -> SimulatedServer:
        """Listen for the program that asks."""
        program = PROGRAM.get()
        assert program is not None, "only programs listen"
        assert at not in self._listening or not self._listening[at].program.alive, f"{at} is taken"
        server = SimulatedServer(self, at)
        self._listening[at] = _Listening(make, program, server)
        return server

    async def connect(
        self, make: Callable[[], asyncio.BaseProtocol], at: tuple[str, int]
    ) -> tuple[SimulatedTransport, asyncio.BaseProtocol]:
        """Connect the program that asks; where nothing answers, that takes for ever."""
        program = PROGRAM.get()
        assert program is not None, "only programs connect"
        await self.travel(program.host, at[0])
        found = self._listening.get(at)
        await self.travel(at[0], program.host)
        if found is None or not found.program.alive or self._listening.get(at) is not found:
            raise ConnectionRefusedError(f"nobody listens at {at[0]}:{at[1]}")
        self._ports += 1
        own = (program.host, self._ports)
        near = SimulatedTransport(self, program, own, at)
        far = SimulatedTransport(self, found.program, at, own)
        near.far, far.far = far, near
        for end in (near, far):
            self._ends[end] = None
        self.loop.call_soon(_accept, found.make, far, context=found.program.context)
        protocol = make()
        near.set_protocol(protocol)
        protocol.connection_made(near)
        return near, protocol

    def lose(self, program: SimulatedProgram) -> None:
        """The program is gone: its connections close, and nobody listens for it."""
        for at, found in list(self._listening.items()):
            if found.program is program:
                del self._listening[at]
        for end in list(self._ends):
            if end.program is program:
                end.lose()


class _Listening:
    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        program: SimulatedProgram,
        server: SimulatedServer,
    ) -> None:
        self.make = make
        self.program = program
        self.server = server


def _accept(make: Callable[[], asyncio.BaseProtocol], end: SimulatedTransport) -> None:
    protocol = make()
    end.set_protocol(protocol)
    protocol.connection_made(end)


class NetworkedLoop(SimulatedLoop):
    """A simulated loop whose connections are those of a simulated network."""

    network: Network

    async def create_connection(  # type: ignore[override] # of asyncio's many ways, ours
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        ssl: object = None,
    ) -> tuple[SimulatedTransport, asyncio.BaseProtocol]:
        """See asyncio; there is no TLS here."""
        assert ssl is None, "connections are plain here"
        return await self.network.connect(protocol_factory, (host, port))

    async def create_server(  # type: ignore[override] # of asyncio's many ways, ours
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        *,
        sock: socket,
        **_: Any,
    ) -> SimulatedServer:
        """See asyncio; `sock` is what `listener` made."""
        return self.network.serve(protocol_factory, sock.getsockname())
