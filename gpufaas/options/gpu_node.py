"""Options of a node and its GPUs, for `up`, `exec`, `check` and `gpu-manager`."""

import argparse
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from cache_manager import eviction
from common import numerals
from common.addresses import Address
from common.errors import BadSize
from common.gpu_wishes import RUNTIMES
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
# The flags of fields of StackNode, which have its defaults: metavar and help.
_FLAGS = {
    "devices": ("D", "auto, cuda, cuda:0,1 or cpu:N (auto)"),
    "gpu_memory": ("SIZE", "bytes of each GPU to use, as in 8GiB (all)"),
    "store_memory": ("SIZE", "host memory for weights (a quarter of the free)"),
    "host_eviction": ("RULE", f"for host memory: {', '.join(eviction.available())} (lru)"),
    "gpu_overlap": ("N", "leases a GPU holds at once; it runs one at a time (1)"),
    "gpu_concurrency": ("N", "leases a GPU holds whose calls run at the same time (1)"),
    "gpu_slots": ("N", "slots of each GPU, with a lease and an equal part of its compute each (1)"),
    "gpu_vcpus": ("N", "virtual CPUs for each GPU's leases (with several slots, its part of them)"),
    "spare_contexts": ("N", "workers that wait with a context on a GPU (1; of emulated ones 4)"),
    "runtime": (None, "how models without a wish are hosted (process)"),
    "emulate_load": ("S[+S/GiB]", "seconds of an emulated load (0)"),
    "emulate_run": ("S", "seconds of an emulated run (0)"),
    "emulate_disk": ("BYTES", "bytes/s of an emulated disk, shared by all loads (unlimited)"),
    "emulate_pcie": ("BYTES[/gpu]", "bytes/s each way of an emulated PCIe: the node's, or a GPU's"),
    "emulate_context": ("S[:BYTES]", "seconds and memory of an emulated context (0)"),
    "spill": ("DIR", "folder for weights that memory has no room for (none)"),
}
_OF_ONE_PROGRAM = ("devices", "gpu_memory", "emulate_run")
_NUMBERS = {
    "gpu_overlap": ("GPU overlap", range(1, 65)),
    "gpu_concurrency": ("GPU concurrency", range(1, 65)),
    "gpu_slots": ("GPU slots", range(1, MOST_SLOTS + 1)),
    "gpu_vcpus": ("GPU vCPUs", range(4097)),
    "spare_contexts": ("spare contexts", range(17)),
}


def add_node_table_options(parser: argparse.ArgumentParser) -> None:
    """Options that change the table [node] of the settings."""
    _add_flags(
        parser, (name for name in _FLAGS if name not in {"host_eviction", "gpu_vcpus"}), "node."
    )


def add_device_options(parser: argparse.ArgumentParser, log_level: str = "warning") -> None:
    """Options for GPUs, all that a single program needs."""
    _add_flags(parser, _OF_ONE_PROGRAM)
    levels = ["debug", "info", "warning", "error"]
    parser.add_argument("--log-level", default=log_level, choices=levels)


def add_stack_option(parser: argparse.ArgumentParser) -> None:
    text = "use the GPUs of the stack that is up, instead of a GPU manager for this program alone"
    parser.add_argument("--stack", action="store_true", help=text)


def refuse_devices(options: argparse.Namespace) -> None:
    """Refuse options for GPUs where the GPUs are those of the stack."""
    usual = StackNode()
    for name in _OF_ONE_PROGRAM:
        if getattr(options, name) != getattr(usual, name):
            raise CommandError(f"--{name.replace('_', '-')} is no option of the stack's GPUs")


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Options for a node that many functions share: GPUs, the policy, and emulated times."""
    add_device_options(parser, log_level="info")
    _add_flags(parser, (name for name in _FLAGS if name not in _OF_ONE_PROGRAM))
    rules = ", ".join(policies.available())
    parser.add_argument("--policy", default=POLICY, help=f"one of {rules} ({POLICY})")


def _add_flags(parser: argparse.ArgumentParser, names: Iterable[str], table: str = "") -> None:
    """Add the flags with the usual values, or without a value where they are of a table."""
    for name in names:
        metavar, text = _FLAGS[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=f"{table}{name}",
            default=None if table else getattr(StackNode(), name),
            choices=RUNTIMES if name == "runtime" else None,
            metavar=metavar,
            help=text,
        )


def as_flags(node: StackNode) -> list[str]:
    """The flags of `gpu-manager` that say the same."""
    values = {
        f"--{field.name.replace('_', '-')}": getattr(node, field.name) for field in fields(node)
    }
    return [part for flag, value in values.items() if value for part in (flag, str(value))]


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
    return replace(device_settings(options, node, listen), **_node_values(options))


def check_node(node: StackNode, visible_devices: str | None) -> None:
    """Refuse, before anything is started, a value that the GPU manager would refuse."""
    if not _DEVICES.fullmatch(node.devices):
        raise CommandError(f"devices: {node.devices!r}: auto, cuda, cuda:0,2 or cpu:N is expected")
    if node.devices.startswith("cuda"):
        check_named(node.devices, visible_devices)
    _size(node.gpu_memory)
    _node_values(node)


def _node_values(node: StackNode | argparse.Namespace) -> dict[str, Any]:
    """The node's settings that these fields, or the options of their names, say."""
    return {
        **{name: number_of(name, str(getattr(node, name))) for name in _NUMBERS},
        "store_memory_bytes": _size(node.store_memory),
        "host_eviction": node.host_eviction,
        "runtime": node.runtime,
        "emulation": emulation(
            node.emulate_load,
            node.emulate_run,
            disk=node.emulate_disk,
            pcie=node.emulate_pcie,
            context=node.emulate_context,
        ),
    }


def number_of(name: str, text: str) -> int | None:
    """The number of a field; None where nobody says, and nobody has to."""
    what, numbers = _NUMBERS[name]
    if not text and not numbers.start:
        return None
    with suppress(ValueError):
        if (number := numerals.whole(text)) in numbers:
            return number
    low = "a number from 1 to" if numbers.start else "a number up to"
    raise CommandError(f"{what}: {text!r}: {low} {numbers[-1]} is expected")


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


def _size(text: str) -> int | None:
    return parse_size(text) if text else None


def _seconds(text: str, what: str) -> float:
    try:
        seconds = numerals.number(text.removesuffix(_SECONDS))
    except ValueError as error:
        raise CommandError(f"{what}: {text!r} is no number of seconds") from error
    if seconds < 0.0:
        raise CommandError(f"{what}: {text!r} seconds")
    return seconds
