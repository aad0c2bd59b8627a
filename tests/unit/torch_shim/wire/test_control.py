"""A control connection whose manager is slow, frozen, of another version, or only accepts."""

import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import msgpack

from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import PATIENCE_S, wait_until
from torch_shim.errors import ConnectionLost, ManagerUnreachable, OtherVersion, RemoteFailure
from torch_shim.wire import connections, control_connection, manager_session
from torch_shim.wire.control_connection import ControlConnection
from torch_shim.wire.frame_socket import FrameSocket
from torch_shim.wire.manager_session import ManagerSession, ModelLease
from torch_shim.wire.protocol import VERSION, FrameKind, pack_frame

MANAGER_TAKES, ASKED = 64, 80  # requests at once
# What a manager does after HELLO, on its end of each connection.
Behaviour = Callable[["FakeManager", FrameSocket], None]


@pytest.fixture(autouse=True)
def connect_timeout(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long a HELLO is waited for: as long as a busy machine may take, at first."""

    def wait(seconds: float) -> None:
        for module in (control_connection, manager_session, connections):
            monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", seconds)

    wait(PATIENCE_S)
    return wait


@pytest.fixture
def impatient(connect_timeout: Callable[[float], None]) -> None:
    """A HELLO is given up soon."""
    connect_timeout(0.3)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that gives no sign of life is lost soon."""
    monkeypatch.setattr(control_connection, "PING_S", 0.05)


class FakeManager:
    """Accepts at an abstract address; `heard` are the frames' kinds in their order."""

    def __init__(self, behave: Behaviour | None, *, greets: bool) -> None:
        self.accepted = 0
        self.heard: list[FrameKind] = []
        self._behave = behave
        self._greets = greets
        self._welcome = {"node": "node", "gpus": [], "nonce": "", "local": True}
        self._over = threading.Event()
        name = f"gpufaas-test-{secrets.token_hex(8)}"
        self.address = f"unix:@{name}"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{name}")
        self._listening.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def receive(self, wire: FrameSocket) -> Any:
        """The next frame's number."""
        frame = wire.receive()
        self.heard.append(frame.kind)
        number: int = msgpack.decode(frame.packed)[0]
        return number

    def stays(self, _: FrameSocket) -> None:
        """Nothing, until the test is over."""
        self._over.wait()

    def close(self) -> None:
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(FrameSocket(connection),))
            self._threads.append(thread)
            thread.start()

    def _serve(self, wire: FrameSocket) -> None:
        try:
            if self._behave is None:
                self._over.wait()
                return
            if self._greets:
                wire.send(FrameKind.ANSWER, [self.receive(wire), self._welcome])
            self._behave(self, wire)
        except ConnectionLost:
            pass  # as a manager: the shim hung up
        finally:
            wire.close()


@contextmanager
def fake_manager(behave: Behaviour | None = None, *, greets: bool = True) -> Iterator[FakeManager]:
    """One that does this after HELLO; none that says nothing at all."""
    found = FakeManager(behave, greets=greets)
    try:
        yield found
    finally:
        found.close()


def connected(it: FakeManager) -> ControlConnection:
    return ControlConnection(it.address, "team/function:mac", "session")


@pytest.mark.usefixtures("impatient")
def test_hello_is_given_up_when_the_manager_only_accepts() -> None:
    with fake_manager() as it:
        began_s = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.3 s"):
            connected(it)
        session = ManagerSession(it.address, "team/function:mac", patience_s=0.0)
        with pytest.raises(ManagerUnreachable, match=r"did not answer within 0\.3 s"):
            _ = session.control
        assert time.monotonic() - began_s < 30.0


@pytest.mark.usefixtures("impatient")
def test_threads_that_queue_behind_one_that_waited_in_vain_do_not_wait_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]  # goes on with each attempt alone, however long the threads take
    attempts = 0

    def attempt(*words: str) -> ControlConnection:
        nonlocal attempts
        attempts += 1
        now_s[0] += manager_session.FAILED_CONNECT_S
        return ControlConnection(*words)

    monkeypatch.setattr(manager_session, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(manager_session, "ControlConnection", attempt)
    with fake_manager() as it:
        session = ManagerSession(it.address, "team/function:mac", patience_s=0.0)
        with ThreadPoolExecutor(8) as pool:
            for each in [pool.submit(lambda: session.control) for _ in range(8)]:
                with pytest.raises(ManagerUnreachable):
                    each.result()
        assert attempts == 1
        now_s[0] += manager_session.FAILED_CONNECT_S  # then it is tried again
        with pytest.raises(ManagerUnreachable, match="did not answer within"):
            _ = session.control
        assert attempts == 2


@pytest.mark.usefixtures("impatient")
def test_further_channel_is_given_up_when_the_manager_only_accepts() -> None:
    with fake_manager() as it:
        session = ManagerSession(it.address, "team/function:mac")
        with pytest.raises(ConnectionLost, match="timed out"):
            session.dial("worker")  # as for an answer from another node


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", [FrameKind.ACQUIRE, FrameKind.OFFER, FrameKind.WHERE])
def test_session_is_lost_when_the_manager_freezes_while_somebody_waits(kind: FrameKind) -> None:
    with fake_manager(FakeManager.stays) as it:
        found = connected(it)
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(found.ask, kind, {}) for _ in range(2)]
            for each in asked:
                with pytest.raises(ConnectionLost, match="no sign of life"):
                    each.result()
        assert found.lost is not None
        with pytest.raises(ConnectionLost, match="no sign of life"):
            found.notify(FrameKind.RELEASE, {"lease": 1})


def test_answer_is_waited_for_when_the_manager_gives_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_connection, "PING_S", 1.0)  # the manager's thread may be held up
    pings = 6  # more than may stay away

    def answers_late(it: FakeManager, wire: FrameSocket) -> None:
        number = it.receive(wire)
        for _ in range(pings):
            wire.send(FrameKind.ANSWER, [it.receive(wire), {}])
        wire.send(FrameKind.ANSWER, [number, {"lease": 7}])
        it.stays(wire)

    with fake_manager(answers_late) as it:
        found = connected(it)
        assert found.ask(FrameKind.ACQUIRE, {}).fields == {"lease": 7}
        assert it.heard == [FrameKind.HELLO, FrameKind.ACQUIRE] + [FrameKind.PING] * pings
        found.close()


def test_manager_may_be_silent_when_it_takes_a_piece_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_connection, "PING_S", 0.15)  # its thread may be held up besides

    def answers_late(it: FakeManager, wire: FrameSocket) -> None:
        number = it.receive(wire)
        time.sleep(10 * control_connection.PING_S)
        wire.send(FrameKind.ANSWER, [number, {}])
        it.stays(wire)

    with fake_manager(answers_late) as it:
        found = connected(it)
        assert found.ask(FrameKind.CHUNK, {}).fields == {}
        found.close()


def test_no_descriptor_stays_open_when_it_came_with_a_frame_that_needs_none() -> None:
    def sends_descriptors(it: FakeManager, wire: FrameSocket) -> None:
        number = it.receive(wire)
        wire.send(FrameKind.LEASE_ENDED, [0, {"lease": 7}], (), [2])
        wire.send(FrameKind.ANSWER, [0, {}], (), [2, 2])
        wire.send(FrameKind.REFUSED, [number, "not allowed", "no", {}], (), [2])
        it.receive(wire)
        wire.send(FrameKind.ANSWER, [99, {}], (), [2, 2])
        it.stays(wire)

    before = open_files()
    with fake_manager(sends_descriptors) as it:
        found = connected(it)
        with pytest.raises(RemoteFailure):
            found.ask(FrameKind.ACQUIRE, {})
        with pytest.raises(ConnectionLost, match="without a request"):
            found.ask(FrameKind.ACQUIRE, {})
        found.close()
    wait_until(lambda: not opened_since(before), "every file is closed")


def test_manager_of_another_version_is_refused_at_once_with_both_versions() -> None:
    other = bytearray(pack_frame(FrameKind.REFUSED, [0, "unknown version", "no", {}]))
    other[2] = VERSION + 1

    def answers(it: FakeManager, wire: FrameSocket) -> None:
        it.receive(wire)
        wire.socket.sendall(other)
        it.stays(wire)

    with fake_manager(answers, greets=False) as it:
        session = ManagerSession(it.address, "team/function:mac")
        with pytest.raises(OtherVersion) as refused:
            _ = session.control
        assert (refused.value.theirs, refused.value.ours) == (VERSION + 1, VERSION)
        assert "upgrade gpufaas at this end" in str(refused.value)
        assert it.accepted == 1


@pytest.fixture
def signals() -> Iterator[None]:
    """This thread gets a signal all the while, as a program does that is profiled."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    main, over = threading.get_ident(), threading.Event()

    def send() -> None:
        while not over.wait(0.05):
            signal.pthread_kill(main, signal.SIGUSR1)

    sending = threading.Thread(target=send)
    sending.start()
    yield
    over.set()
    sending.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("signals")
def test_session_is_lost_when_the_manager_takes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_connection, "_SEND_TIMEOUT_S", 1)
    with fake_manager(FakeManager.stays) as it:
        found = connected(it)
        with pytest.raises(ConnectionLost, match="no byte in 1 s"):
            found.ask(FrameKind.CHUNK, {}, [bytes(8 << 20)])
        assert found.lost is not None


def test_requests_beyond_what_a_manager_takes_at_once_wait_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would not read the signs of life that are asked for behind them."""
    monkeypatch.setattr(control_connection, "PING_S", 1.0)  # the manager's thread may be held up
    most, released = threading.Event(), threading.Event()

    def answers(it: FakeManager, wire: FrameSocket) -> None:
        numbers: list[int] = []
        pings = 0
        # Four one after another, so that no request follows; threads may be slow to ask at all.
        while pings < 4 or len(numbers) < 2 or not released.is_set():
            if number := it.receive(wire):
                numbers.append(number)
            pings = 0 if number else pings + 1
            if not number:
                wire.send(FrameKind.ANSWER, [0, {}])
            if pings >= 4 and len(numbers) >= 2:
                most.set()
        for number in numbers:
            wire.send(FrameKind.ANSWER, [number, {}])
        for _ in range(ASKED - len(numbers)):
            while not (number := it.receive(wire)):
                wire.send(FrameKind.ANSWER, [0, {}])
            wire.send(FrameKind.ANSWER, [number, {}])
        it.stays(wire)

    with fake_manager(answers) as it:
        found = connected(it)
        with ThreadPoolExecutor(ASKED) as pool:
            asked = [pool.submit(found.ask, FrameKind.ACQUIRE, {}) for _ in range(ASKED)]
            assert most.wait(PATIENCE_S)
            assert 2 <= it.heard.count(FrameKind.ACQUIRE) <= MANAGER_TAKES
            released.set()
            for each in asked:
                assert each.result().fields == {}
        found.close()


@pytest.mark.usefixtures("often")
def test_lease_is_told_to_be_over_when_its_session_was_given_up() -> None:
    with fake_manager(FakeManager.stays) as it:
        session = ManagerSession(it.address, "team/function:mac", patience_s=0.0)
        first = session.control
        worker = session._peer("worker")  # noqa: SLF001 - an answer names it
        lease = ModelLease(1, "digest", worker, session)
        before = lease.in_force
        with pytest.raises(ConnectionLost):
            first.ask(FrameKind.ACQUIRE, {})
        assert session.control is not first
        assert (before, lease.in_force) == (True, False)
        session.close()
