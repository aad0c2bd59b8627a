"""A function with one model that carries out jobs, each so many calls; a process of the bench.

`python -m bench.neighbours.job_function MODEL`. Reads lines `JOB CALLS`, runs jobs side by side in
threads, and prints for each an object of JSON when it is done.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig, LlamaModel

from bench.measure.peers.four_models import NAMES, made, random_input
from torch_shim.process_report import report

_BATCH = 16
_WORDS, _VOCABULARY = 96, 1000
_NUMBERS, _PASSES = 4 << 20, 6
_RELATIVE, _ABSOLUTE = 1e-3, 1e-3


class _Llama(torch.nn.Module):
    """The hidden states of a small llama."""

    def __init__(self) -> None:
        super().__init__()
        small = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
        self.llama = LlamaModel(small)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.llama(input_ids=words, use_cache=False, return_dict=False)[0]
        return found


class _Elementwise(torch.nn.Module):
    """Bound by memory: each pass reads and writes 16 MiB and computes almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Parameter(torch.randn(_NUMBERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.numbers + x
        for _ in range(_PASSES):
            found = found * 0.5 + self.numbers
        return found[:8]


def _several(name: str) -> torch.Tensor:
    return torch.cat([random_input(name) for _ in range(_BATCH)])


_MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    **{name: partial(lambda name: (made(name), _several(name)), name) for name in NAMES},
    "llama": lambda: (_Llama(), torch.randint(0, _VOCABULARY, (1, _WORDS))),
    "elementwise": lambda: (_Elementwise(), torch.randn(1)),
}
MODELS = tuple(_MODELS)


def main() -> None:
    """Build the model, and carry out lines."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    plain, x = _MODELS[sys.argv[1]]()
    plain.eval()
    expected = plain(x)
    model, printing = plain.cuda(), threading.Lock()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job, calls = line.split()
        run = partial(_run, job, int(calls), model, (x, expected), printing)
        threading.Thread(target=run).start()


def _run(
    job: str,
    calls: int,
    model: torch.nn.Module,
    known: tuple[torch.Tensor, torch.Tensor],
    printing: threading.Lock,
) -> None:
    torch.set_grad_enabled(False)
    x, expected = known
    wrong, begun_s = 0, time.perf_counter()
    for _ in range(calls):
        found = model(x.cuda()).cpu()
        wrong += not torch.allclose(found, expected, _RELATIVE, _ABSOLUTE)
    seconds = time.perf_counter() - begun_s
    local = json.loads(report.as_json()).get("local_calls") or {}
    done = {"job": job, "seconds": seconds, "wrong": wrong, "local": local}
    with printing:
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
