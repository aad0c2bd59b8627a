"""The function under measure: plain PyTorch that carries out orders from its standard input.

`python -m bench.measure.function_program` runs natively or under the shim and does the same in
both. An order and its answer are one line of JSON each.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torchvision  # type: ignore[import-untyped] # it comes without types

from bench.measure.function_orders import (
    COPY,
    LAYERS,
    LINEAR,
    PIXELS,
    WIDE,
    FunctionOrder,
    OrderResult,
)

_WIDE_LAYERS, _WIDE_FEATURES = 30, 2048
_COPY_BYTES = 256 << 20
_HEADS, _WIDER, _TOKENS = 32, 2.6875, 16  # of a block: 11,008 features inside where 4,096 go in
_RANDOM_VALUES = 1 << 22
_WITHOUT_INITIALISATION = {"googlenet", "inception_v3"}  # initial weights take a minute

Module = torch.nn.Module


class Pixels(Module):
    """A model that reads every pixel of a large input and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 1000)

    def forward(self, x: torch.Tensor) -> Any:
        """Scores of the mean colours."""
        return self.head(x.mean((2, 3)))


class MeasuredFunction:
    """Models on the device by name and seed, and their calls."""

    def __init__(self) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._models: dict[tuple[str, int], Module] = {}

    def carry_out(self, order: FunctionOrder) -> OrderResult:
        """Carry out an order: time calls, or count them."""
        model = self._model(order.model, order.seed)
        before = _counts()
        work = self._work(model, order)
        answer = OrderResult(device=self._device.type, weights_bytes=_bytes(model))
        began_s = time.perf_counter()
        if order.threads:
            answer.calls, answer.elapsed_s = _counted(lambda: self._work(model, order), order)
        else:
            for _ in range(order.warm):
                work()
            deadline_s = time.perf_counter() + order.most_s
            while len(answer.seconds) < order.calls:
                answer.seconds.append(work())
                if time.perf_counter() > deadline_s:
                    break
            answer.calls = len(answer.seconds) + order.warm
            answer.elapsed_s = time.perf_counter() - began_s
        _add_counts(answer, before)
        return answer

    def _model(self, name: str, seed: int) -> Module:
        found = self._models.get((name, seed))
        if found is None:
            torch.manual_seed(seed)
            found = self._models[(name, seed)] = make_model(name).eval().to(self._device)
        return found

    def _work(self, model: Module, order: FunctionOrder) -> Callable[[], float]:
        """A function that makes one call and returns its seconds."""
        torch.manual_seed(0)
        host = make_input(order.model, order.batch)
        there = host.to(self._device)
        waits = self._device.type == "cuda"
        if order.how == "graph" and waits:
            return _replayed(model, there)
        grad = order.how == "grad"

        def call() -> float:
            given = there.clone() if order.how == "fresh" else there
            source = host.clone() if order.how == "whole" else host
            with torch.set_grad_enabled(grad):
                began_s = time.perf_counter()
                if order.how == "whole":
                    model(source.to(self._device)).cpu()
                else:
                    model(given)
                if waits:
                    torch.cuda.synchronize()
                return time.perf_counter() - began_s

        return call


class Block(Module):
    """One block of a language model: attention, and a gated layer, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inside = int(width * _WIDER)
        self.heads = min(_HEADS, width // 8)
        self.query, self.key, self.value, self.out = (_linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            _linear(width, inside),
            _linear(width, inside),
            _linear(inside, width),
        )

    def forward(self, x: torch.Tensor) -> Any:
        """As a decoder does it, without its positions and its cache."""
        batch, tokens, width = x.shape
        normed = torch.nn.functional.layer_norm(x, (width,))
        shape = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (
            each(normed).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        normed = torch.nn.functional.layer_norm(x, (width,))
        return x + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


def _linear(inputs: int, outputs: int) -> torch.nn.Linear:
    """Random weights in half precision, made by repetition: a number at a time takes minutes."""
    made = torch.nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.float16)
    count = inputs * outputs
    some = torch.randn(min(_RANDOM_VALUES, count)).mul_(inputs**-0.5).half()
    repeated = some.repeat(-(-count // some.numel()))[:count]
    made.weight = torch.nn.Parameter(repeated.view(outputs, inputs), requires_grad=False)
    return made


class Copy(Module):
    """Not a model: copies its pinned memory to the device at the speed of the link."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("there", torch.empty(_COPY_BYTES, dtype=torch.uint8))
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        self._source = source.pin_memory() if torch.cuda.is_available() else source

    def forward(self, _: torch.Tensor) -> None:
        """Copy."""
        self.get_buffer("there").copy_(self._source, non_blocking=True)


def make_model(name: str) -> Module:
    """A model by name: one of ours, or torchvision's with random weights."""
    if name == LINEAR:
        return torch.nn.Linear(4, 4)
    if name == COPY:
        return Copy()
    if name == PIXELS:
        return Pixels()
    if name.startswith(LAYERS):
        count, width = map(int, name.removeprefix(LAYERS).split("x"))
        return torch.nn.Sequential(*(Block(width) for _ in range(count)))
    if name == WIDE:
        layers = [torch.nn.Linear(_WIDE_FEATURES, _WIDE_FEATURES) for _ in range(_WIDE_LAYERS)]
        return torch.nn.Sequential(*layers)
    more = {"init_weights": False} if name in _WITHOUT_INITIALISATION else {}
    made: Module = torchvision.models.get_model(name, weights=None, **more)
    return made


def make_input(name: str, batch: int) -> torch.Tensor:
    """An input on the host."""
    if name in (LINEAR, WIDE, COPY):
        return torch.rand(batch, _WIDE_FEATURES if name == WIDE else 4)
    if name.startswith(LAYERS):
        return torch.rand(batch, _TOKENS, int(name.rpartition("x")[2])).half()
    side = 299 if name == "inception_v3" else 224
    return torch.rand(batch, 3, side, side)


def _replayed(model: Module, there: torch.Tensor) -> Callable[[], float]:
    """A call of the model, recorded natively as a CUDA graph: a function that replays it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch gives it no types
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(there)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(there)

    def call() -> float:
        began_s = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    return call


def _bytes(model: Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _counted(
    make_work: Callable[[], Callable[[], float]], order: FunctionOrder
) -> tuple[int, float]:
    """The calls that all threads make in the time, and the time until the last thread's end."""
    counts = [0] * order.threads
    begins = threading.Barrier(order.threads + 1)

    def loop(number: int) -> None:
        work = make_work()
        for _ in range(max(order.warm, 1)):
            work()
        begins.wait()
        deadline_s = time.perf_counter() + order.most_s
        while time.perf_counter() < deadline_s:
            work()
            counts[number] += 1

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(order.threads)]
    for thread in threads:
        thread.start()
    begins.wait()
    began_s = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts), time.perf_counter() - began_s


def _counts() -> Any:
    """The counts of the shim so far; None where there is no shim."""
    module = sys.modules.get("torch_shim.process_report")
    return None if module is None else json.loads(module.report.as_json())


def _add_counts(answer: OrderResult, before: Any) -> None:
    after = _counts()
    if after is None:
        return
    answer.graphs = after["graph_calls"] - before["graph_calls"]
    earlier = before["local_calls"]
    answer.local = {
        reason: count - earlier.get(reason, 0)
        for reason, count in after["local_calls"].items()
        if count > earlier.get(reason, 0)
    }
    for name in ("trace_s", "queue_s", "transfer_s", "compute_s"):
        setattr(answer, name, after[name] - before[name])


def main() -> None:
    """Carry out orders until the input ends."""
    function = MeasuredFunction()
    for line in sys.stdin:
        answer = function.carry_out(FunctionOrder(**json.loads(line)))
        print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main()
