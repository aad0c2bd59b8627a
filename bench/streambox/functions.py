"""The functions of the bench: models of StreamBox's sizes, on a node with one emulated GPU."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.measure.report import MeasurementFailed
from cache_manager.model.ids import MIB
from gpu_manager.node.settings import EmulatedTimes
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient, needs

# The machine has no room for 64 whole models: all sizes are an eighth, so that what is compared
# stays as it is.
PART = 8
# What a process takes of a GPU before it holds a model: 1.5 GB, as StreamBox says of its V100s, and
# what SAGE measures on an A100.
CONTEXT_BYTES = 1500 * MIB // PART
SMALL_CONTEXT_BYTES = 414 * MIB // PART
# Weights of resnet18, vgg11, densenet121 and ssd300 in float32, and what a call takes beside them.
KINDS = {"resnet18": (45, 8), "vgg": (507, 24), "densenet": (31, 16), "ssd": (100, 24)}
_STORE_BYTES = 4 << 30  # all functions' weights: what is measured is the GPU
_ROW = 16  # bytes of a model's first weights, which a call adds to its input


class BenchFunction(NamedTuple):
    """A function with its model."""

    number: int
    image: SealedWeights
    activations_mib: int

    @property
    def weights_bytes(self) -> int:
        return len(self.image.content)

    def client(self, node: NodeThread, *, sends: bool = True) -> FunctionClient:
        """An instance of the function; the first one sends the weights."""
        found = FunctionClient(node.address, node.credential(f"f{self.number}"))
        if sends:
            found.upload(self.image)
        return found

    def call(self, client: FunctionClient) -> None:
        """One call, whose numbers are checked."""
        found = client.use(self.image, needs(self.activations_mib), x=1.0)
        client.release()
        expected = (1.0 + self.number) * (self.activations_mib * MIB // 4)
        if found != [expected] * 4:
            raise MeasurementFailed(f"function {self.number} answered {found}, not {expected}")


@contextmanager
def functions(count: int) -> Iterator[list[BenchFunction]]:
    """So many functions, of each kind in turn."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            weights_mib, activations_mib = list(KINDS.values())[number % len(KINDS)]
            first = struct.pack("4f", *[float(number)] * 4)
            image = weights(first + bytes(weights_mib * MIB // PART - _ROW))
            stack.callback(image.close)
            made.append(BenchFunction(number, image, activations_mib // PART))
        yield made


def call_each(made: Sequence[BenchFunction], clients: Sequence[FunctionClient]) -> None:
    """Call every function once, so that what is measured begins with a GPU that is full."""
    for function, client in zip(made, clients, strict=True):
        function.call(client)


def memory_for(processes: int) -> int:
    """The MiB of a GPU on which about so many processes of the mean model have room."""
    mean_mib = sum(map(sum, KINDS.values())) / len(KINDS)
    spare_mib = 40  # so that not each larger model drives one out
    return int(processes * (mean_mib + CONTEXT_BYTES * PART / MIB + spare_mib) / PART)


@contextmanager
def node(
    runtime: str, gpu_mib: int, load_s: float = 0.0, run_s: float = 0.0
) -> Iterator[NodeThread]:
    """A node whose models are hosted by this runtime."""
    emulation = EmulatedTimes(load_s=load_s, run_s=run_s, context_bytes=CONTEXT_BYTES)
    with node_thread(
        gpu_mib, runtime=runtime, emulation=emulation, store_memory_bytes=_STORE_BYTES
    ) as found:
        yield found
