"""The comparison of workers with the ledger, on a node with real workers."""

from collections.abc import Iterator

import pytest

from cache_manager.model.ids import MIB
from common.gpu_wishes import RUNTIMES, STREAM
from gpu_manager.node.device_watch import process_uses
from gpu_manager.node.ledger import ProcessUse
from gpu_manager.node.settings import EmulatedTimes
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import node_thread
from tests.kit.nodes.worker_client import FunctionClient

CONTEXT_BYTES = 100 * MIB
MODEL_BYTES = 64 * MIB
COUNT = 2


@pytest.fixture
def models() -> Iterator[list[SealedWeights]]:
    made = [weights(bytes([number]) * MODEL_BYTES) for number in range(COUNT)]
    yield made
    for each in made:
        each.close()


def uses(it: EmbeddedNode) -> tuple[ProcessUse, ...] | None:
    (gpu,) = it.manager.node.gpus.values()
    return process_uses(gpu)


def uses_by_wrong_books(it: EmbeddedNode) -> tuple[ProcessUse, ...] | None:
    """What is found when the models were granted nothing."""
    (gpu,) = it.manager.node.gpus.values()
    with pytest.MonkeyPatch.context() as patch:
        for resident in gpu.residents.values():
            patch.setattr(resident.memory, "granted_bytes", 0)
        return process_uses(gpu)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_real_workers_take_what_they_are_granted(runtime: str, models: list[SealedWeights]) -> None:
    emulation = EmulatedTimes(context_bytes=CONTEXT_BYTES)
    with node_thread(2048, runtime=runtime, emulation=emulation) as node:
        client = FunctionClient(node.address, node.credential())
        for model in models:
            client.upload(model)
            client.use(model, x=1.0)
            client.release()
        processes, each = (1, COUNT) if runtime == STREAM else (COUNT, 1)
        found = node.run(uses)
        assert found is not None
        assert len(found) == processes
        assert {use.pid for use in found} == set(node.pids())
        for use in found:
            least_bytes = each * MODEL_BYTES + CONTEXT_BYTES
            assert least_bytes <= use.measured_bytes < least_bytes + 32 * MIB
            assert use.over_bytes < 32 * MIB

        wrong = node.run(uses_by_wrong_books)
        assert wrong is not None
        assert len(wrong) == processes
        for use in wrong:
            assert use.over_bytes >= each * MODEL_BYTES
        client.close()
