"""A node whose disk, PCIe and contexts are emulated: real workers, weights from its disk."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB, Tier
from gpu_manager.node.settings import EmulatedTimes
from gpu_manager.runtimes.runtime import LoadSpan
from tests.kit.fakes.sealed_images import open_images
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.waiting import wait_until
from torch_shim.errors import RemoteFailure

pytestmark = pytest.mark.group("emulated_paths", seconds=130)

CONTEXT_BYTES = 100 * MIB
EMULATION = EmulatedTimes(
    disk_bytes_per_s=200 * MIB,
    pcie_bytes_per_s=400 * MIB,
    context_s=5.0,  # in which what should happen beside it may be held up
    context_bytes=CONTEXT_BYTES,
)


@pytest.fixture(scope="module", autouse=True)
def quick_fork_servers() -> None:
    """None: weights are read from disk while the first worker's fork server is started."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeThread]:
    """Host memory has room for one of the models."""
    with node_thread(
        1024, spill=tmp_path, store_memory_bytes=5 * MIB, emulation=EMULATION
    ) as found:
        yield found


def model(first: float) -> SealedWeights:
    return weights(struct.pack("4f", *[first] * 4) + os.urandom(4 * MIB - 16))


def tier(node: NodeThread, image: SealedWeights) -> Tier:
    return node.run(lambda it: it.manager.library.store.tier(image.digest))


def spans(node: NodeThread) -> dict[str, LoadSpan]:
    """The parts of the only load whose model is on the GPU."""

    def found(_: object) -> dict[str, LoadSpan]:
        (gpu,) = node.node.manager.node.gpus.values()
        (resident,) = gpu.residents.values()
        return {span.phase: span for span in resident.load_spans}

    return node.run(found)


def on_disk(node: NodeThread, it: FunctionClient) -> SealedWeights:
    """A model that another one has driven to disk."""
    image, other = model(1.0), model(2.0)
    it.upload(image)
    it.upload(other)
    other.close()
    assert tier(node, image) is Tier.DISK
    return image


def test_model_from_disk_is_called_when_its_weights_arrived_beside_its_context(
    node: NodeThread,
) -> None:
    it = FunctionClient(node.address, node.credential())
    image = on_disk(node, it)

    assert it.use(image) == [2.0] * 4

    parts = spans(node)
    assert parts["read"].begin_s < parts["worker"].end_s
    assert parts["transfer"].begin_s < parts["context"].end_s
    (gpu,) = node.run(lambda found: list(found.manager.node.gpus.values()))
    assert (gpu.spec.context_bytes, gpu.ledger.context_bytes) == (CONTEXT_BYTES, CONTEXT_BYTES)
    (measured,) = [resident.memory.measured_bytes for resident in gpu.residents.values()]
    assert measured >= CONTEXT_BYTES + 4 * MIB
    it.close()
    image.close()


def test_call_is_refused_and_nothing_is_left_when_the_weights_on_disk_have_changed(
    node: NodeThread, tmp_path: Path
) -> None:
    it = FunctionClient(node.address, node.credential())
    image = on_disk(node, it)
    (file,) = tmp_path.glob(f"{image.digest}*")
    with file.open("r+b") as content:
        content.seek(-1, os.SEEK_END)
        last = content.read()[0]
        content.seek(-1, os.SEEK_END)
        content.write(bytes([last ^ 1]))

    with pytest.raises(RemoteFailure, match="another digest"):
        it.use(image)

    image.close()
    assert tier(node, image) is Tier.ABSENT
    wait_until(lambda: not node.pids(), "no worker is left")
    wait_until(lambda: open_images() <= 1, "no image is left but the other one")
    it.close()
