"""Leases that run at once on a node with real workers: what their models use of the GPU."""

from cache_manager.model.ids import ModelId
from gpufaas.embedded_node import EmbeddedNode
from scheduler.api import METRICS
from scheduler.model.profiles import Profile
from tests.kit.nodes.manager_client import model
from tests.kit.nodes.node_thread import NodeThread, node_thread
from tests.kit.nodes.worker_client import FunctionClient
from tests.kit.waiting import wait_until


def profile(node: NodeThread) -> Profile:
    """The profile of the one model that the node's scheduler knows."""

    def found(it: EmbeddedNode) -> tuple[ModelId, Profile]:
        ((name, of),) = it.core.cluster.profiles.known.items()
        return name, of

    return node.run(found)[1]


def test_what_a_model_uses_is_counted_in_its_worker_and_kept_with_its_profile() -> None:
    image = model(1.0)
    with node_thread(gpu_concurrency=2) as node:
        it = FunctionClient(node.address, node.credential())
        it.upload(image)
        it.acquire(image)
        for _ in range(4):
            it.call(image)
        it.release()
        wait_until(lambda: bool(profile(node).features), "the metrics are there")
        features = profile(node).features
        it.close()
    assert set(features) == set(METRICS)
    assert features["execution_time"] > 0.0
    assert features["occupancy"] > 0.0  # operators a second
    assert features["global_load"] > 0.0
    assert features["host_to_device"] > 0.0
    assert features["memory_used_max"] >= image.table.total_bytes
    image.close()
