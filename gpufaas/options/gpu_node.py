"""Options of a node and its GPUs, for `exec`, `check` and `gpu-manager`."""

import argparse
import re
from contextlib import suppress
from dataclasses import replace

from cache_manager import eviction
from common import numerals
from common.addresses import Address
from common.errors import BadSize
from common.gpu_wishes import PROCESS, RUNTIMES
from common.numerals import parse_size
from gpu_manager.api import MOST_SLOTS, EmulatedTimes, NodeSettings
from gpu_manager.node.host_gpus import check_named
from gpufaas.errors import CommandError
from gpufaas.options.configuration import StackNode
from scheduler import policies

POLICY = "lalbo3"
_DEVICES = re.compile(r"auto|cuda(:[0-9]+(,[0-9]+)*)?|cpu(:[0-9]+)?")
_SECONDS = "s"
_EACH_GPU = "/gpu"
_MOST_OVERLAP = 64
_MOST_SPARE = 16
_MOST_VCPUS = 4096
GPU_CONCURRENCY = "leases a GPU holds whose calls run at the same time (1)"
GPU_SLOTS = "slots of each GPU, with a lease and an equal part of its compute each (1)"
SPARE_CONTEXTS = "workers that wait with a context on each GPU, at most (1; of emulated ones 4)"

EMULATED_PATHS = (
    ("--emulate-disk", "BYTES", "bytes/s of an emulated disk, shared by all loads (unlimited)"),
    (
        "--emulate-pcie",
        "BYTES[/gpu]",
        "bytes/s each way of an emulated PCIe: the node's, or a GPU's",
    ),
    ("--emulate-context", "S[:BYTES]", "seconds and memory of an emulated context (0)"),
)


def add_device_options(parser: argparse.ArgumentParser, log_level: str = "warning") -> None:
    """Options for GPUs, all that a single program needs."""
    add = parser.add_argument
    add("--devices", default="auto", metavar="D", help="auto, cuda, cuda:0,1 or cpu:N (auto)")
    add("--gpu-memory", metavar="SIZE", help="bytes of each GPU to use, as in 8GiB (all)")
    add("--emulate-run", metavar="S", default="0", help="seconds of an emulated run")
    add("--log-level", default=log_level, choices=["debug", "info", "warning", "error"])


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Options for a node that many functions share: GPUs, the policy, and emulated times."""
    add_device_options(parser, log_level="info")
    add = parser.add_argument
    add("--store-memory", metavar="SIZE", help="host memory for weights (a quarter of the free)")
    rules = ", ".join(eviction.available())
    add("--host-eviction", default="lru", help=f"what leaves host memory first: {rules} (lru)")
    add("--policy", default=POLICY, help=f"one of {', '.join(policies.available())} ({POLICY})")
    overlap = "leases a GPU holds at once; it runs one at a time (1)"
    add("--gpu-overlap", default="1", metavar="N", help=overlap)
    add("--gpu-concurrency", default="1", metavar="N", help=GPU_CONCURRENCY)
    add("--gpu-slots", default="1", metavar="N", help=GPU_SLOTS)
    vcpus = "virtual CPUs for the leases of each GPU (with several slots its part of the machine's)"
    add("--gpu-vcpus", metavar="N", help=vcpus)
    add("--spare-contexts", metavar="N", help=SPARE_CONTEXTS)
    add(
        "--runtime",
        choices=RUNTIMES,
        default=PROCESS,
        help="how models without a wish are hosted (process)",
    )
    add("--emulate-load", metavar="S[+S/GiB]", default="0", help="seconds of an emulated load")
    for flag, metavar, help_text in EMULATED_PATHS:
        add(flag, metavar=metavar, default="0", help=help_text)


def device_settings(
    options: argparse.Namespace, node: str, listen: tuple[Address, ...]
) -> NodeSettings:
    """The settings of a single program's node from these options."""
    return NodeSettings(
        node=node,
        listen=listen,
        devices=options.devices,
        visible_devices=options.environment.get("CUDA_VISIBLE_DEVICES"),
        gpu_memory_bytes=_size(options.gpu_memory),
        emulation=emulation("0", options.emulate_run),
    )


def node_settings(
    options: argparse.Namespace, node: str, listen: tuple[Address, ...]
) -> NodeSettings:
    return replace(
        device_settings(options, node, listen),
        store_memory_bytes=_size(options.store_memory),
        host_eviction=options.host_eviction,
        gpu_overlap=gpu_overlap(options.gpu_overlap),
        gpu_concurrency=gpu_concurrency(options.gpu_concurrency),
        gpu_slots=gpu_slots(options.gpu_slots),
        gpu_vcpus=gpu_vcpus(options.gpu_vcpus),
        spare_contexts=spare_contexts(options.spare_contexts),
        runtime=options.runtime,
        emulation=emulation(
            options.emulate_load,
            options.emulate_run,
            disk=options.emulate_disk,
            pcie=options.emulate_pcie,
            context=options.emulate_context,
        ),
    )


def check_node(node: StackNode, visible_devices: str | None) -> None:
    """Refuse, before anything is started, a value that the GPU manager would refuse."""
    if not _DEVICES.fullmatch(node.devices):
        raise CommandError(f"devices: {node.devices!r}: auto, cuda, cuda:0,2 or cpu:N is expected")
    if node.devices.startswith("cuda"):
        check_named(node.devices, visible_devices)
    for size in (node.gpu_memory, node.store_memory):
        _size(size or None)
    for read, number in (
        (gpu_overlap, node.gpu_overlap), (gpu_concurrency, node.gpu_concurrency),
        (gpu_slots, node.gpu_slots),
    ):  # fmt: skip
        read(str(number))
    gpu_vcpus(node.gpu_vcpus)
    spare_contexts(node.spare_contexts)
    emulation(
        node.emulate_load,
        node.emulate_run,
        disk=node.emulate_disk,
        pcie=node.emulate_pcie,
        context=node.emulate_context,
    )


def gpu_overlap(text: str) -> int:
    """The number of leases that a GPU holds at once."""
    return _number_from_one("GPU overlap", text, _MOST_OVERLAP)


def gpu_concurrency(text: str) -> int:
    """The number of leases whose calls a GPU runs at once."""
    return _number_from_one("GPU concurrency", text, _MOST_OVERLAP)


def gpu_slots(text: str) -> int:
    return _number_from_one("GPU slots", text, MOST_SLOTS)


def gpu_vcpus(text: str | None) -> int | None:
    """The virtual CPUs for the leases of a GPU; None where nobody says."""
    return _number_or_none("GPU vCPUs", text, _MOST_VCPUS)


def spare_contexts(text: str | None) -> int | None:
    """How many workers wait with a context, at most; None where nobody says."""
    return _number_or_none("spare contexts", text, _MOST_SPARE)


def emulation(
    load: str, run: str, *, disk: str = "0", pcie: str = "0", context: str = "0"
) -> EmulatedTimes:
    """The times of emulated GPUs: `0.2+1.5/GiB` is 0.2 s, and 1.5 s for each GiB.

    Disk and PCIe are bytes a second, as in `1.5GB`; `12GB/gpu` is a PCIe for each GPU. `0.3:400MiB`
    is a context that takes 0.3 s.
    """
    base, _, per_gib = load.partition("+")
    if per_gib and not per_gib.endswith("/GiB"):
        raise CommandError(f"emulated load {load!r}: 0.2+1.5/GiB, for example, is expected")
    context_s, _, context_bytes = context.partition(":")
    return EmulatedTimes(
        load_s=_seconds(base, "emulated load"),
        load_s_per_gib=_seconds(per_gib.removesuffix("/GiB") or "0", "emulated load"),
        run_s=_seconds(run, "emulated run"),
        disk_bytes_per_s=_bytes(disk, "emulated disk"),
        pcie_bytes_per_s=_bytes(pcie.removesuffix(_EACH_GPU), "emulated PCIe"),
        pcie_per_gpu=pcie.endswith(_EACH_GPU),
        context_s=_seconds(context_s, "emulated context"),
        context_bytes=_bytes(context_bytes or "0", "emulated context"),
    )


def _bytes(text: str, what: str) -> int:
    if text == "0":
        return 0
    try:
        return parse_size(text)
    except BadSize as error:
        raise CommandError(f"{what}: {error}") from error


def _size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)


def _seconds(text: str, what: str) -> float:
    try:
        seconds = numerals.number(text.removesuffix(_SECONDS))
    except ValueError as error:
        raise CommandError(f"{what}: {text!r} is no number of seconds") from error
    if seconds < 0.0:
        raise CommandError(f"{what}: {text!r} seconds")
    return seconds


def _number_from_one(what: str, text: str, most: int) -> int:
    with suppress(ValueError):
        if 1 <= (number := numerals.whole(text)) <= most:
            return number
    raise CommandError(f"{what}: {text!r}: a number from 1 to {most} is expected")


def _number_or_none(what: str, text: str | None, most: int) -> int | None:
    if not text:
        return None
    with suppress(ValueError):
        if 0 <= (number := numerals.whole(text)) <= most:
            return number
    raise CommandError(f"{what}: {text!r}: a number up to {most} is expected")
