"""A stack that nobody uses: which of its processes hold torch, and from when on."""

import contextlib
from pathlib import Path

from tests.kit.stacks.handlers import GREETING, ON_GPU, PLAIN, write
from tests.kit.stacks.load import Asked, warm
from tests.kit.stacks.stack import Rest, Stack, children
from tests.kit.waiting import wait_until

_LIBRARY = "/libtorch_cpu.so"


def test_torch_is_in_no_process_before_the_first_gpu_function_and_in_workers_after_it(
    own: Stack,
) -> None:
    own.start()
    assert len(own.processes()) >= 5  # `up`, etcd, scheduler, GPU manager, gateway
    assert not _with_torch(own)
    rest = Rest(own)
    rest.deploy("greets", annotations={**write(own.work, "greets", GREETING), **PLAIN})
    assert rest.call("greets", "you").text == "hello you"
    assert not _with_torch(own)
    assert not children(own.part("gpu-manager"))

    gpu = {"com.gpufaas.enabled": "true"}
    rest.deploy("computes", annotations={**write(own.work, "computes", ON_GPU), **gpu})
    wait_until(own.workers, "a worker is ready before it is needed", instead=own.said)
    warm(own, rest, Asked("computes"))

    (server,) = children(own.part("gpu-manager"))
    held = _with_torch(own)
    assert server in held
    assert held & set(children(server))
    assert held.issuperset(own.instances("computes"))
    parts = {own.part(f"-m gpufaas {name}") for name in ("gateway", "scheduler", "gpu-manager")}
    assert not held & parts


def _with_torch(own: Stack) -> set[int]:
    """The processes that have loaded torch's library."""
    found = set()
    for pid in own.processes():
        with contextlib.suppress(OSError):
            if _LIBRARY in Path(f"/proc/{pid}/maps").read_text():
                found.add(pid)
    return found
