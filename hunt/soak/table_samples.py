"""The lengths of what a stack remembers: the tables of scheduler, gateway, node and etcd."""

import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench.measure.process_usage import parts_in_tree
from bench.measure.whole_stack import WholeStack
from scheduler.service.access import ApiRole, token

_ASK_S = 10.0
# Of each process that has metrics; gauges alone, summed over their labels.
_GATEWAY = {
    "calls in flight": "gpufaas_gateway_calls_in_flight",
    "calls waiting": "gpufaas_gateway_calls_waiting",
    "functions": "gpufaas_gateway_functions",
    "jobs queued": "gpufaas_gateway_jobs_queued",
    "dead letters": "gpufaas_gateway_jobs_dead",
    "workflows running": "gpufaas_gateway_workflows_running",
    "bytes of workflows": "gpufaas_gateway_workflow_bytes",
}
_NODE = {
    "leases": "gpufaas_node_leases",
    "sessions": "gpufaas_node_sessions",
    "pieces of data": "gpufaas_node_data_pieces",
    "bytes of weights": "gpufaas_node_weights_bytes",
}
_ETCD = {
    "keys": "etcd_debugging_mvcc_keys_total",
    "bytes of the database": "etcd_mvcc_db_total_size_in_use_in_bytes",
    "watchers": "etcd_debugging_mvcc_watcher_total",
}


class PartAddress(NamedTuple):
    """Where a part of the stack shows its metrics, and the credentials for it."""

    part: str
    url: str
    bearer: str = ""


def addresses_of(running: WholeStack) -> list[PartAddress]:
    """The metrics of every part, found by the commands of its processes."""
    parts = parts_in_tree(running.pid)
    scheduler = token(running.folder.secret_file.read_bytes(), ApiRole.CALLER)
    found = [PartAddress("gateway", running.url)]
    for pid, part in parts.items():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if part == "scheduler":
            address = words[words.index("--listen") + 1]
            found.append(PartAddress(part, f"http://{address}", scheduler))
        elif part == "gpu-manager":
            found.append(PartAddress(part, f"http://{words[words.index('--metrics') + 1]}"))
        elif part == "etcd":
            option = "--listen-client-urls="
            urls = [word.removeprefix(option) for word in words if word.startswith(option)]
            found += [PartAddress(part, url) for url in urls]
    return found


def sample_tables(
    running: WholeStack, addresses: list[PartAddress]
) -> dict[tuple[str, str], float]:
    """The length of each table, by part and name."""
    found = {("scheduler", name): value for name, value in _scheduler(running).items()}
    named = {"gateway": _GATEWAY, "gpu-manager": _NODE, "etcd": _ETCD}
    for each in addresses:
        page = _metrics(each)
        found[each.part, "metrics shown"] = float(len(page))
        for name, metric in named.get(each.part, {}).items():
            found[each.part, name] = _sum_of(page, metric)
    return found


def _scheduler(running: WholeStack) -> Mapping[str, float]:
    cluster = running.cluster()
    slots = [slot for gpu in cluster["gpus"] for slot in gpu["slots"]]
    return {
        "leases": float(sum(len(slot["leases"]) for slot in slots)),
        "waiting requests": float(cluster["waiting"] + cluster["waiting_locally"]),
        "resident models": float(sum(len(gpu["residents"]) for gpu in cluster["gpus"])),
        "known models": float(len(running.scheduler.get("/models"))),
        "owners with terms": float(len(running.scheduler.get("/quotas")["owners"])),
    }


def _metrics(address: PartAddress) -> dict[str, float]:
    """Every line of a page of metrics, by its name with its labels."""
    headers = {"Authorization": f"Bearer {address.bearer}"} if address.bearer else {}
    request = urllib.request.Request(f"{address.url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _sum_of(page: Mapping[str, float], metric: str) -> float:
    return sum(value for name, value in page.items() if name.partition("{")[0] == metric)
