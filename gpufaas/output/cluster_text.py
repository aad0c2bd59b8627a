"""A scheduler's cluster as text: figures, GPUs, queues, models and how these are hosted."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from common.gpu_wishes import PROCESS, STREAM, WHOLE
from common.numerals import format_size
from gpufaas.output.cells import columns, short_seconds
from gpufaas.output.request_text import configuration_text
from scheduler import policies
from scheduler.model.errors import UnknownPolicy

_MOST_MODELS = _MOST_FUNCTIONS = 4
_BAR = 20
_GPU_HEAD = ("GPU", "MEMORY", "STATE", "QUEUE", "MODELS BY SIZE")


def cluster_text(cluster: dict[str, Any]) -> str:
    return "\n".join([*_head(cluster), "", *_gpus(cluster)])


def _head(cluster: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{cluster['name']} leads, term {cluster['term']}, state in {cluster['store']}; "
        f"policy {in_force_text(cluster)}"
    )
    ratio = cluster["hit_ratio"]
    yield (
        f"waiting {cluster['waiting']} (+{cluster['waiting_locally']} for one GPU)   "
        f"hits {cluster['hits']}  misses {cluster['misses']}"
        + ("" if ratio is None else f"  hit ratio {ratio:.3f}")
        + f"   evictions {cluster['evictions']}  prefetches {cluster['prefetches']}"
    )
    ended = ", ".join(f"{outcome} {count}" for outcome, count in cluster["ended"].items())
    yield f"ended: {ended or 'nothing yet'}"
    for name, words in (("waits", "to a lease"), ("totals", "to the end")):
        times = cluster[name]
        if times is not None:
            yield (
                f"{words}: median {short_seconds(times['median_s'])}, 99th percentile "
                f"{short_seconds(times['p99_s'])}, average {short_seconds(times['average_s'])}"
            )
    accuracy = cluster["accuracy"]
    if accuracy is not None:
        yield (
            f"load and run: estimated {short_seconds(accuracy['estimated_s'])}, measured "
            f"{short_seconds(accuracy['measured_s'])}, off by {short_seconds(accuracy['error_s'])} "
            f"(average of {accuracy['leases']} leases)"
        )


def _gpus(cluster: dict[str, Any]) -> Iterator[str]:
    gpus = cluster["gpus"]
    if not gpus:
        yield "no GPU is attached: gpufaas gpu-manager --scheduler URL"
        return
    functions = cluster.get("functions", {})
    head, *lines = columns([_GPU_HEAD, *(_gpu(gpu, functions) for gpu in gpus)]).splitlines()
    yield head
    for gpu, line in zip(gpus, lines, strict=True):
        yield line
        yield from _wide_leases(gpu)


def _gpu(gpu: dict[str, Any], functions: dict[str, list[str]]) -> tuple[str, ...]:
    used, memory = gpu["used_bytes"], gpu["memory_bytes"]
    filled = round(_BAR * used / memory) if memory else 0
    bar = "#" * min(filled, _BAR) + "." * (_BAR - min(filled, _BAR))
    sizes = f"{format_size(used)} of {format_size(memory)}"
    queued = sum(len(slot["queue"]) for slot in gpu["slots"])
    return gpu["id"], f"{bar} {sizes}", _state(gpu), f"{queued:>5}", _models(gpu, functions)


def _state(gpu: dict[str, Any]) -> str:
    leases = [lease for slot in gpu["slots"] for lease in slot["leases"]]
    if gpu["draining"]:
        return "draining"
    if gpu["silent"]:
        return "silent"
    if any(lease["loading"] for lease in leases):
        return "loading"
    return f"busy {len(leases)}" if leases else "idle"


def _wide_leases(gpu: dict[str, Any]) -> Iterator[str]:
    """The leases on several slots, or with a configuration: one line each."""
    for slot in gpu["slots"]:
        for lease in slot["leases"]:
            more, given = lease.get("more_slots", ()), lease.get("configuration")
            if more or given:
                slots = ", ".join([slot["id"], *more])
                how = f": {configuration_text(given)}" if given else ""
                yield f"  lease of {', '.join(lease['models'])} on {slots}{how}"


def _models(gpu: dict[str, Any], functions: dict[str, list[str]]) -> str:
    """The largest models, each by its functions where these are known."""
    largest = sorted(gpu["residents"], key=lambda resident: -resident["memory_bytes"])
    shown = [
        f"{functions_text(functions.get(resident['model'], [])) or resident['model']} "
        f"{format_size(resident['memory_bytes'])}{'*' if resident['pinned'] else ''}"
        f"{unusual_hosting(resident)}"
        for resident in largest[:_MOST_MODELS]
    ]
    left_out, empty = len(largest) - len(shown), len(gpu.get("contexts", ()))
    if empty:
        shown.append(f"{empty} empty process{'es' if empty > 1 else ''}")
    return ", ".join(shown) + (f" and {left_out} more" if left_out else "")


def choice_text(choice: dict[str, Any]) -> str:
    """A policy with its parameters, in the form that `gpufaas policy set` takes."""
    parameters = [f"{name}={value:g}" for name, value in choice["parameters"].items()]
    return " ".join([choice["policy"], *parameters])


def in_force_text(choice: dict[str, Any]) -> str:
    """A policy with the parameters that differ from its defaults; all if it is unknown here."""
    usual = _usual(choice["policy"])
    changed = {k: v for k, v in choice["parameters"].items() if v != getattr(usual, k, None)}
    return choice_text({"policy": choice["policy"], "parameters": changed})


@lru_cache(maxsize=32)
def _usual(policy: str) -> object:
    with suppress(UnknownPolicy):  # one of another release
        return policies.make(policy)
    return None


def functions_text(names: list[str]) -> str:
    """The first names, and how many more there are."""
    left_out = len(names) - _MOST_FUNCTIONS
    return " + ".join(names[:_MOST_FUNCTIONS]) + (f" + {left_out} more" if left_out > 0 else "")


def hosting_text(row: Mapping[str, Any]) -> str:
    """`process`, or `stream of 3, 25 % of the GPU`; `-` while it is unknown."""
    text = row.get("runtime") or "-"
    if text == STREAM and row.get("process_models"):
        text = f"{text} of {row['process_models']}"
    share = row.get("gpu_share") or WHOLE
    return text if share == WHOLE else f"{text}, {100 * share:.3g} % of the GPU"


def hostings_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """How the copies of a model are hosted: each way once."""
    return "; ".join(dict.fromkeys(map(hosting_text, rows))) or "-"


def unusual_hosting(row: Mapping[str, Any]) -> str:
    """The same in brackets; empty for a process that has all of the GPU, and while unknown."""
    text = hosting_text(row)
    return "" if text in ("-", PROCESS) else f" ({text})"
