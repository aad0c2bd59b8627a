"""Held ports: no program gets one by chance, and the one with the number can listen."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpufaas.errors import CommandError
from gpufaas.stack.held_ports import LOOPBACK, HeldPort, claimed_port, free_address

_MANY = 300


@pytest.fixture
def port() -> Iterator[HeldPort]:
    with HeldPort() as held:
        yield held


def server(at: HeldPort) -> socket.socket:
    """As servers listen: with reuse of the address allowed."""
    listening = socket.create_server((LOOPBACK, at.number))
    assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    return listening


def test_server_listens_at_a_held_port_again_and_again(port: HeldPort) -> None:
    for _ in range(3):
        with server(port) as listening, socket.create_connection((LOOPBACK, port.number)) as one:
            other, _ = listening.accept()
            other.close()  # first: this end waits in TIME_WAIT
            assert one.recv(1) == b""


def test_second_server_is_refused_while_the_first_listens(port: HeldPort) -> None:
    with server(port), pytest.raises(OSError) as refused:  # noqa: PT011 - its number says it
        server(port)
    assert refused.value.errno == errno.EADDRINUSE


def test_connection_is_refused_when_no_server_listens(port: HeldPort) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port.number))


def test_no_program_gets_a_held_port_when_it_asks_for_any() -> None:
    with ExitStack() as stack:
        held = {stack.enter_context(HeldPort()).number for _ in range(_MANY)}
        listening = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=_MANY))
        given = {listening.getsockname()[1]}
        for _ in range(_MANY):
            asking = stack.enter_context(socket.socket())
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asking.bind((LOOPBACK, 0))
            given.add(asking.getsockname()[1])
            connected = stack.enter_context(socket.create_connection(listening.getsockname()))
            given.add(connected.getsockname()[1])
        assert len(held) == _MANY
        assert not held & given


def test_port_is_free_again_when_it_is_released() -> None:
    ports = [HeldPort() for _ in range(5)]
    assert not any(is_free(port) for port in ports)
    for port in ports:
        port.release()
    assert any(is_free(port) for port in ports)  # another program may have got one meanwhile


def is_free(port: HeldPort) -> bool:
    """Whether a program can bind it without reuse, which a held port refuses."""
    with socket.socket() as other:
        try:
            other.bind((LOOPBACK, port.number))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


def test_two_stacks_that_start_at_once_get_different_addresses(
    port: HeldPort, tmp_path: Path
) -> None:
    usual, kept = port.address, tmp_path / "kept"
    with ExitStack() as first, ExitStack() as second:
        assert free_address(usual, usual, "metrics", first, kept) == usual
        assert free_address(usual, usual, "metrics", second, tmp_path / "other") != usual
    with ExitStack() as third:
        assert free_address(usual, usual, "metrics", third, kept) == usual


def test_server_keeps_its_port_over_restarts_when_the_usual_one_was_taken(
    port: HeldPort, tmp_path: Path
) -> None:
    usual, kept = port.address, tmp_path / "kept"
    with server(port), ExitStack() as stack:
        first = free_address(usual, usual, "the scheduler", stack, kept)
        ours = HeldPort(int(first.rpartition(":")[2]))  # between the starts no program gets it
    assert first != usual
    with ours, ExitStack() as stack:
        assert free_address(usual, usual, "the scheduler", stack, kept) == first
        with ExitStack() as other:  # a second stack in the same moment
            assert free_address(usual, usual, "the scheduler", other, kept) == usual
    for nonsense in (b"", b"none", b"\xff", b"99999", "٣".encode()):
        kept.write_bytes(nonsense)
        with ExitStack() as stack:
            assert free_address(usual, usual, "the scheduler", stack, kept) == usual


def test_kept_port_is_given_up_when_another_server_listens_there(
    port: HeldPort, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    with HeldPort() as usual, server(usual), server(port), ExitStack() as stack:
        kept.write_text(str(port.number))
        address = free_address(usual.address, usual.address, "the scheduler", stack, kept)
        assert address not in {usual.address, port.address}
        assert kept.read_text() == address.rpartition(":")[2] + "\n"


@pytest.mark.parametrize("listen", ["nowhere.invalid:80", "192.0.2.1:9"])
def test_address_that_is_none_of_this_machine_has_no_port_as_its_remedy(listen: str) -> None:
    refusal = f"^{listen} cannot be listened at for the gateway: [^;]+$"
    with (
        pytest.raises(CommandError, match=refusal),
        claimed_port(listen, "the gateway", "--port N"),
    ):
        pass


def test_chosen_address_is_refused_when_another_stack_claims_it(
    port: HeldPort, tmp_path: Path
) -> None:
    refusal = f"{port.address} is not free for the scheduler"
    with (
        claimed_port(port.address, "the gateway", "--port N"),
        ExitStack() as stack,
        pytest.raises(CommandError, match=refusal),
    ):
        free_address(port.address, "127.0.0.1:7700", "the scheduler", stack, tmp_path / "kept")
