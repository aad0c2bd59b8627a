"""Work that changes how many threads torch has."""

import threading
from collections.abc import Callable

import torch


def in_a_thread(work: Callable[[], object]) -> None:
    """So that this process's number of threads stays what it is."""
    failures: list[BaseException] = []

    def whole() -> None:
        before = torch.get_num_threads()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        torch.set_num_threads(before)

    thread = threading.Thread(target=whole)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
