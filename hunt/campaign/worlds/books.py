"""What schedulers and GPU managers say that they hold: leases, queues, bytes of GPU memory."""

import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hunt.campaign.judging.leftovers import GpuBooks

_ASK_S, _OK = 5.0, 200
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PREFIX = "gpufaas_node_"


def answers(url: str) -> bool:
    """Whether a request of this URL is answered, and well."""
    with suppress(OSError), _DIRECTLY.open(url, timeout=_ASK_S) as answer:
        return bool(answer.status == _OK)
    return False


def leases(cluster: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that the scheduler has given and not got back."""
    return tuple(
        str(lease) for gpu in cluster["gpus"] for slot in gpu["slots"] for lease in slot["leases"]
    )


def waiting(cluster: Mapping[str, Any]) -> int:
    """How many requests wait, for any GPU or for one."""
    return int(cluster["waiting"]) + int(cluster["waiting_locally"])


class NodeMetrics:
    """What one GPU manager shows to Prometheus; asking raises OSError where nobody answers."""

    def __init__(self, url: str) -> None:
        with _DIRECTLY.open(f"{url}/metrics", timeout=_ASK_S) as answer:
            self._lines: list[str] = answer.read().decode().splitlines()

    def leases(self) -> int:
        """Leases in force or ending."""
        return int(self._value("leases") or 0)

    def granted(self, gpu: str) -> int:
        """What its ledger has granted of this GPU; 0 if it is another manager's."""
        return self._value("gpu_memory_bytes", gpu=gpu, kind="granted") or 0

    def hosted(self, gpu: str) -> int:
        """How many models it has on this GPU."""
        return self._value("gpu_models", gpu=gpu) or 0

    def over(self, gpu: str) -> int:
        """What processes take beyond their grants, where it can be measured."""
        return self._value("worker_memory_bytes", gpu=gpu, kind="over") or 0

    def _value(self, name: str, **labels: str) -> int | None:
        words = [f'{key}="{value}"' for key, value in labels.items()]
        begins = (f"{_PREFIX}{name}{{", f"{_PREFIX}{name} ")
        for line in self._lines:
            if line.startswith(begins) and all(word in line for word in words):
                return int(float(line.rpartition(" ")[2]))
        return None


def books(cluster: Mapping[str, Any], nodes: Sequence[NodeMetrics]) -> Mapping[str, GpuBooks]:
    """The memory of every GPU, as the scheduler and its manager have it."""
    found = {}
    for gpu in cluster["gpus"]:
        name = gpu["id"]
        named = sum(one["memory_bytes"] for one in (*gpu["residents"], *gpu["contexts"]))
        found[name] = GpuBooks(
            counted=gpu["used_bytes"] - gpu["withheld_bytes"],
            named=named,
            models=len(gpu["residents"]),
            granted=sum(node.granted(name) for node in nodes),
            hosted=sum(node.hosted(name) for node in nodes),
            over=sum(node.over(name) for node in nodes),
        )
    return found
