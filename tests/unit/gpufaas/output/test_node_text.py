"""What `gpufaas status --address` shows of a GPU manager's node."""

from typing import Any

from gpufaas.commands.status import node_text

MIB = 1 << 20
STORE = {"bytes": 3 * MIB, "budget_bytes": 1024 * MIB, "disk_bytes": 0}
COUNTS = {"policy": "lalbo3", "waiting": 1, "leases": 2, "hits": 3, "misses": 4}


def node(*transfers: dict[str, Any]) -> dict[str, Any]:
    gpu = {"id": "n/cpu:0", "models": 1, "granted_bytes": 64 * MIB, "memory_bytes": 512 * MIB}
    return {"node": "n", "store": STORE, "gpus": [gpu | {"transfers": list(transfers)}]} | COUNTS


def test_node_is_shown_with_what_went_to_its_gpu_and_how_long_that_waited() -> None:
    moved = {"direction": "to_gpu", "class": "call", "bytes": 5 * MIB, "waited_s": 0.25}
    unmoved = {"direction": "to_host", "class": "background", "bytes": 0, "waited_s": 0.0}

    lines = node_text(node(moved, unmoved)).splitlines()

    assert lines[0].split()[:6] == ["node", "n", "policy", "lalbo3", "leases", "2"]
    assert lines[4].split()[:2] == ["n/cpu:0", "1"]
    assert lines[-2].split() == ["TRANSFERS", "DIRECTION", "CLASS", "BYTES", "WAITED"]
    assert lines[-1].split()[-2:] == ["0.250", "s"]
    assert "background" not in lines[-1]


def test_node_is_shown_without_transfers_when_none_are_counted() -> None:
    assert "TRANSFERS" not in node_text(node())
