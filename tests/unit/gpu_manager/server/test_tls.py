"""A manager's certificate and the shim's end of TLS, against each other on loopback."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpu_manager.errors import BadSetting
from gpu_manager.server.listening import Certificate
from tests.kit.network.certificates import self_signed
from tests.kit.waiting import PATIENCE_S
from torch_shim.errors import ConnectionLost
from torch_shim.wire.connections import carries_descriptors, connect

MUCH = os.urandom(5 << 20)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("certificates"))


class Echo:
    """A server on a thread of its own that decrypts, and sends back what it hears."""

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.site = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.hung_up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._listening.close()
        self._loop.close()

    async def _run(self) -> None:
        serving = asyncio.create_task(self._serve())
        await self._stop.wait()
        serving.cancel()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                client, _ = await loop.sock_accept(self._listening)
                group.create_task(self._echo(client))

    async def _echo(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            clear = await self._certificate.decrypted(client, PATIENCE_S)
        except OSError:
            return
        clear.setblocking(False)
        with clear:
            while heard := await loop.sock_recv(clear, 1 << 16):
                await loop.sock_sendall(clear, heard)
        self.hung_up.set()


@contextmanager
def echoing(pair: tuple[Path, Path]) -> Iterator[tuple[Echo, Certificate]]:
    certificate = Certificate(*pair)
    echo = Echo(certificate)
    try:
        yield echo, certificate
    finally:
        echo.close()


def test_bytes_come_back_while_one_thread_writes_and_another_reads(
    pair: tuple[Path, Path],
) -> None:
    with echoing(pair) as (echo, certificate):
        with connect(f"tls:{echo.site}#{certificate.fingerprint}") as stream:
            assert not carries_descriptors(stream)
            writer = threading.Thread(target=stream.sendall, args=(MUCH,))
            writer.start()
            heard = bytearray()
            while len(heard) < len(MUCH):
                piece = stream.recv(1 << 20)
                assert piece
                heard += piece
            writer.join()
            assert bytes(heard) == MUCH
        assert echo.hung_up.wait(PATIENCE_S)


def test_another_certificate_than_the_address_names_is_refused(pair: tuple[Path, Path]) -> None:
    with echoing(pair) as (echo, _), pytest.raises(ConnectionLost, match="another certificate"):
        connect(f"tls:{echo.site}#{'0' * 64}")


def test_without_a_fingerprint_the_machine_has_to_trust_the_certificate(
    pair: tuple[Path, Path],
) -> None:
    with echoing(pair) as (echo, _), pytest.raises(ConnectionLost, match=r"TLS with .* failed"):
        connect(f"tls:{echo.site}")


def test_peer_that_speaks_no_tls_is_refused() -> None:
    def answer() -> None:
        client, _ = plain.accept()
        with client:
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            client.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as plain:
        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ConnectionLost, match=r"TLS with .* failed"):
            connect(f"tls:127.0.0.1:{plain.getsockname()[1]}#{'0' * 64}")
        answering.join()


def test_end_of_the_server_ends_the_stream(pair: tuple[Path, Path]) -> None:
    with echoing(pair) as (echo, certificate):
        stream = connect(f"tls:{echo.site}#{certificate.fingerprint}")
        stream.sendall(b"x")
        assert stream.recv(1) == b"x"
    with stream:
        stream.settimeout(PATIENCE_S)
        assert stream.recv(1) == b""


def test_forked_child_holds_no_connection_open(pair: tuple[Path, Path]) -> None:
    with (
        echoing(pair) as (echo, certificate),
        connect(f"tls:{echo.site}#{certificate.fingerprint}"),
    ):
        assert connections_to(echo.site) == 1
        child = os.fork()
        if child == 0:
            os._exit(connections_to(echo.site))
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def connections_to(site: str) -> int:
    """How many sockets of this process are connected to HOST:PORT."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        if path.is_socket():
            # Another thread may close it meanwhile; or it is not connected.
            with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as copy:
                peer = copy.getpeername()
                found += copy.family == socket.AF_INET and f"{peer[0]}:{peer[1]}" == site
    return found


def test_certificate_without_its_key_is_told_clearly(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    _, other_key = self_signed(tmp_path)
    with pytest.raises(BadSetting, match="certificate"):
        Certificate(pair[0], other_key)
    with pytest.raises(BadSetting, match="No such file"):
        Certificate(tmp_path / "none.pem", pair[1])
