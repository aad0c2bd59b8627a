"""Collections of garbage that threads share."""

import gc
import threading

import pytest

from gpu_manager.worker.life import SharedCollection

WAITING = 5


class LockThatTells:
    """A lock that tells whenever a thread asks for it."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.asked.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_one_collection_serves_all_that_wait_for_it_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, begun, may_end = LockThatTells(), threading.Semaphore(0), threading.Event()
    collections = 0

    def collect() -> None:
        nonlocal collections
        collections += 1
        begun.release()
        may_end.wait()

    with monkeypatch.context() as patches:
        patches.setattr(threading, "Lock", lambda: lock)
        shared = SharedCollection()
    monkeypatch.setattr(gc, "collect", collect)
    threads = [threading.Thread(target=shared.collect) for _ in range(1 + WAITING)]
    threads[0].start()
    begun.acquire()  # it may have passed by what the others left
    for thread in threads[1:]:
        thread.start()
    for _ in threads:
        lock.asked.acquire()
    may_end.set()
    for thread in threads:
        thread.join()
    assert collections == 2
