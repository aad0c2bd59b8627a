"""A function with one model, whose threads call it in a closed loop; a process of the bench.

`python -m bench.merging.calling_function MODEL`. Reads lines `THREADS SECONDS`, and prints for each
an object of JSON: the seconds of each call or token, how many answers were wrong, and what ran in
the function itself.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.measure.peers.four_models import NAMES, made, random_input
from bench.merging.writing_clients import WRITERS, WritingClient, writing_model
from torch_shim.process_report import report

Made = tuple[torch.nn.Module, Callable[[], torch.Tensor]]
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


def _of(name: str) -> Made:
    return made(name), partial(random_input, name)


MODELS: dict[str, Callable[[], Made]] = {name: partial(_of, name) for name in NAMES}


class _Caller:
    """One client: the same input again and again, whose answer is known."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor, expected: torch.Tensor) -> None:
        self._model, self._x, self._expected = model, x, expected
        self.seconds: list[float] = []
        self.wrong = 0

    def call_until(self, end_s: float) -> None:
        torch.set_grad_enabled(False)
        while (begun_s := time.perf_counter()) < end_s:
            found = self._model(self._x.cuda()).cpu()
            self.seconds.append(time.perf_counter() - begun_s)
            self.wrong += not torch.allclose(found, self._expected, _RELATIVE, _ABSOLUTE)


Client = _Caller | WritingClient


def main() -> None:
    """Build the model, and carry out lines."""
    torch.manual_seed(0)  # so that all processes have the same weights
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    clients = _clients(sys.argv[1])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        threads, seconds = line.split()
        found = [clients(number) for number in range(int(threads))]
        print(json.dumps(_load(found, float(seconds))), flush=True)


def _clients(name: str) -> Callable[[int], Client]:
    """What makes a client of the model by its number."""
    if name in WRITERS:
        writer, texts = writing_model(name)
        return lambda number: WritingClient(name, writer, texts[number % len(texts)])
    model, make = MODELS[name]()
    model.eval()
    known = [(x, model(x)) for x in (make() for _ in range(32))]
    on_gpu = model.cuda()
    return lambda number: _Caller(on_gpu, *known[number % len(known)])


def _load(callers: list[Client], seconds: float) -> dict[str, Any]:
    end_s = time.perf_counter() + seconds
    threads = [threading.Thread(target=each.call_until, args=(end_s,)) for each in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = json.loads(report.as_json())
    return {
        "seconds": [spent for each in callers for spent in each.seconds],
        "wrong": sum(each.wrong for each in callers),
        "local": said.get("local_calls") or {},
    }


if __name__ == "__main__":
    main()
