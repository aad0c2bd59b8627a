"""Where a worker's last words go, such as those of a library that aborts."""

import os
import resource
import signal

import pytest

from gpu_manager.runtimes.fork_client import ForkServer
from gpu_manager.worker import orders


@pytest.fixture(scope="module", autouse=True)
def quick_fork_servers() -> None:
    """None: they have the environment of the test."""


@pytest.mark.parametrize(("variable", "heard"), [("1", True), ("", False)])
async def test_words_of_a_worker_are_heard_only_when_its_standard_error_is_kept(
    variable: str,
    heard: bool,  # noqa: FBT001 - a parameter
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPUFAAS_WORKER_STDERR", variable)
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # says on descriptor 2 which signal ends it
    server = ForkServer(emulated=True)
    try:
        worker = await server.fork()
        await worker.send(orders.EndCalls(1, 1))
        await worker.receive()  # it obeys: its descriptors are what they stay
        resource.prlimit(worker.pid, resource.RLIMIT_CORE, (0, 0))

        os.kill(worker.pid, signal.SIGABRT)

        await worker.exited
        assert ("Fatal Python error: Aborted" in capfd.readouterr().err) == heard
        worker.close()
    finally:
        await server.close()
