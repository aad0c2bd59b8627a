"""Weights lie once on a GPU for all functions of a tenant, and once on a node for all tenants."""

import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cache_manager.model.ids import MIB
from gpufaas.embedded_node import EmbeddedNode
from tests.kit.nodes.manager_client import SealedWeights, weights
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.waiting import wait_until
from tests.kit.worlds.gpu_node import granted_bytes

_WEIGHTS_BYTES = 8 * MIB
_STORED = 'gpufaas_node_weights_bytes{kind="memory"}'


@pytest.fixture
def shared() -> Iterator[SealedWeights]:
    found = weights(struct.pack("4f", 1.0, 2.0, 3.0, 4.0) * (_WEIGHTS_BYTES // 16))
    yield found
    found.close()


def _granted(node: EmbeddedNode) -> list[int]:
    """The bytes of the GPU's memory that each model was granted."""
    (gpu,) = node.manager.node.gpus.values()
    granted = sorted(granted_bytes(gpu).values())
    assert gpu.ledger.granted_bytes == sum(granted)
    return granted


def _stored_bytes(node: EmbeddedNode) -> float:
    """The bytes of weights in host memory, as the manager's metrics have them."""
    page = node.manager.metrics().decode()
    (line,) = [each for each in page.splitlines() if each.startswith(_STORED)]
    return float(line.rpartition(" ")[2])


def _used(node: NodeThread, image: SealedWeights, functions: int, tenant: str) -> None:
    """So many functions of a tenant send the weights and use them, one after the other."""
    with ExitStack() as stack:
        for number in range(functions):
            client = FunctionClient(node.address, node.credential(f"f{number}", tenant))
            stack.callback(client.close)
            client.upload(image)
            assert client.use(image) == [2.0, 3.0, 4.0, 5.0]
            client.release()


def _after_uses_by(functions: int, image: SealedWeights) -> int:
    """The bytes of the GPU that the one model needs, as measured, after calls of all functions."""
    with node_thread() as node:
        _used(node, image, functions, "team")
        assert len(node.pids()) == 1
        assert node.run(_stored_bytes) == _WEIGHTS_BYTES
        wait_until(lambda: node.run(_granted)[0] < 2 * _WEIGHTS_BYTES, "the calls are measured")
        (granted_bytes,) = node.run(_granted)
        return granted_bytes


def test_functions_of_a_tenant_have_one_copy_on_the_gpu_and_one_in_host_memory(
    shared: SealedWeights,
) -> None:
    by_count = [_after_uses_by(functions, shared) for functions in (1, 10, 50)]
    # Fifty functions need what one needs, but for the measured peaks of their calls.
    assert max(by_count) - min(by_count) < _WEIGHTS_BYTES / 8


def test_tenants_have_copies_of_their_own_on_the_gpu_and_one_in_host_memory(
    shared: SealedWeights,
) -> None:
    with node_thread() as node:
        for tenant in ("team", "others"):
            _used(node, shared, 5, tenant)
        assert len(set(node.pids())) == 2
        assert all(granted >= _WEIGHTS_BYTES for granted in node.run(_granted))
        assert len(node.run(_granted)) == 2
        assert node.run(_stored_bytes) == _WEIGHTS_BYTES
