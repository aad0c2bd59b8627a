"""The commands around a node: their options, the table of models, and the sums of `--stats`."""

import argparse
import re
import time
from pathlib import Path

import pytest

from common.addresses import UnixAddress
from gpu_manager.api import EmulatedTimes, NodeSettings
from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands.models import node_table
from gpufaas.errors import CommandError
from gpufaas.options.gpu_node import (
    add_node_options,
    emulation,
    node_settings,
    number_of,
)
from gpufaas.remote.manager_api import default_address
from gpufaas.shim_counts import ReportFile, summed_counts
from scheduler.api import DecisionCounts

ROW = {
    "model": "team/0123456789",
    "label": "reader",
    "gpu": "node/cpu:0",
    "tier": "gpu",
    "state": "loaded",
    "bytes": 100 << 20,
    "weights_bytes": 98 << 20,
    "uses": 3,
    "pinned": True,
}


@pytest.mark.parametrize(
    ("load", "run", "expected"),
    [
        ("0", "0", EmulatedTimes()),
        ("1.5", "0.02", EmulatedTimes(1.5, 0.0, 0.02)),
        ("0.2s+1.5s/GiB", "20e-3s", EmulatedTimes(0.2, 1.5, 0.02)),
    ],
)
def test_emulated_times_are_read(load: str, run: str, expected: EmulatedTimes) -> None:
    assert emulation(load, run) == expected


@pytest.mark.parametrize(
    ("load", "run"), [("fast", "0"), ("1+2", "0"), ("1+2/MiB", "0"), ("0", "-1"), ("nan", "0")]
)
def test_emulated_times_are_refused_when_they_make_no_sense(load: str, run: str) -> None:
    with pytest.raises(CommandError, match="emulated"):
        emulation(load, run)


def test_emulated_paths_and_contexts_are_read() -> None:
    found = emulation("0", "0", disk="1.5GB", pcie="4500MB", context="0.285s:414MiB")

    assert (found.disk_bytes_per_s, found.pcie_bytes_per_s) == (1_500_000_000, 4_500_000_000)
    assert (found.context_s, found.context_bytes) == (0.285, 414 << 20)
    assert not found.pcie_per_gpu
    assert emulation("0", "0", context="2") == EmulatedTimes(context_s=2.0)


def test_emulated_pcie_is_each_gpus_when_the_setting_says_so() -> None:
    found = emulation("0", "0", pcie="12GB/gpu")

    assert (found.pcie_bytes_per_s, found.pcie_per_gpu) == (12_000_000_000, True)


@pytest.mark.parametrize(
    "more",
    [
        {"disk": "fast"},
        {"pcie": "-1"},
        {"pcie": "12GB/node"},
        {"context": "1:2:3"},
        {"context": "soon"},
    ],
)
def test_emulated_paths_are_refused_when_they_make_no_sense(more: dict[str, str]) -> None:
    with pytest.raises(CommandError, match="emulated"):
        emulation("0", "0", **more)


def test_settings_are_what_the_options_say() -> None:
    parser = argparse.ArgumentParser()
    add_node_options(parser)
    options = parser.parse_args(
        ["--devices", "cpu:2", "--gpu-memory", "1GiB", "--host-eviction", "cost"]
    )
    options.environment = {"CUDA_VISIBLE_DEVICES": "1"}

    settings = node_settings(options, "node", (UnixAddress("@x"),))

    assert (settings.devices, settings.gpu_memory_bytes) == ("cpu:2", 1 << 30)
    assert (settings.store_memory_bytes, settings.visible_devices) == (None, "1")
    assert settings.host_eviction == "cost"


def settings_of(*flags: str) -> NodeSettings:
    """The settings of a node by these flags."""
    parser = argparse.ArgumentParser()
    add_node_options(parser)
    options = parser.parse_args([*flags])
    options.environment = {}
    return node_settings(options, "node", (UnixAddress("@x"),))


def test_gpu_has_one_slot_and_one_lease_unless_flags_say_more() -> None:
    settings = settings_of()
    assert (settings.gpu_overlap, settings.gpu_concurrency) == (1, 1)
    assert (settings.gpu_slots, settings.gpu_vcpus) == (1, None)
    assert settings_of("--gpu-overlap", "5").gpu_overlap == 5
    assert settings_of("--gpu-concurrency", "2").gpu_concurrency == 2
    sliced = settings_of("--gpu-slots", "4", "--gpu-vcpus", "8")
    assert (sliced.gpu_slots, sliced.gpu_vcpus) == (4, 8)


@pytest.mark.parametrize("text", ["0", "-1", "many", "65"])
def test_slots_are_refused_when_they_make_no_sense(text: str) -> None:
    with pytest.raises(CommandError, match="GPU slots"):
        number_of("gpu_slots", text)


@pytest.mark.parametrize("text", ["-1", "many", "5000"])
def test_vcpus_are_refused_when_they_make_no_sense(text: str) -> None:
    with pytest.raises(CommandError, match="vCPUs"):
        number_of("gpu_vcpus", text)


@pytest.mark.parametrize(("flags", "expected"), [([], None), (["--spare-contexts", "0"], 0)])
def test_spare_contexts_are_as_usual_unless_a_flag_says_how_many(
    flags: list[str], expected: int | None
) -> None:
    assert settings_of(*flags).spare_contexts == expected


@pytest.mark.parametrize("text", ["-1", "many", "1000"])
def test_spare_contexts_are_refused_when_they_make_no_sense(text: str) -> None:
    with pytest.raises(CommandError, match="spare contexts"):
        number_of("spare_contexts", text)


@pytest.mark.parametrize("text", ["0", "-1", "many", "1000"])
def test_overlap_is_refused_when_it_makes_no_sense(text: str) -> None:
    with pytest.raises(CommandError, match="GPU overlap"):
        number_of("gpu_overlap", text)


def test_manager_is_looked_for_where_this_user_may_run_one(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"XDG_RUNTIME_DIR": "/run/user/1000"}
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert default_address(environment) == "unix:/run/user/1000/gpufaas/node.sock"
    assert default_address({}) == "unix:/run/gpufaas/node.sock"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_address(environment) == "unix:/run/gpufaas/node.sock"


def test_table_has_a_line_for_each_model_and_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr("gpufaas.commands.models.time.time", lambda: now_s)
    resident = ROW | {"runtime": "stream", "since": now_s - 7200, "used": now_s - 5}
    stored = ROW | {"gpu": None, "tier": "host", "bytes": 0, "since": None, "used": None}
    stored |= {"uses": 0, "pinned": False}

    head, first, second = node_table([resident, stored]).splitlines()

    assert head.split()[:3] == ["MODEL", "FUNCTIONS", "WHERE"]
    assert first.split() == [
        "team/0123456789", "reader", "node/cpu:0", "stream", "100", "MiB",
        "2.0", "h", "3", "-", "5", "s", "yes",
    ]  # fmt: skip
    assert second.split() == [
        "team/0123456789",
        "reader",
        "host",
        "-",
        "98",
        "MiB",
        "-",
        "0",
        "-",
        "-",
    ]


def test_share_of_a_gpu_is_shown_with_the_runtime() -> None:
    row = ROW | {"runtime": "stream", "since": time.time(), "used": time.time(), "gpu_share": 0.125}
    assert "stream, 12.5 % of the GPU" in node_table([row])
    assert "stream of 3, 12.5 % of the GPU" in node_table([row | {"process_models": 3}])
    assert "%" not in node_table([row | {"gpu_share": 1.0}])


def test_calls_that_ran_as_one_are_shown_with_the_reason_of_most_others() -> None:
    row = ROW | {"runtime": "process", "since": time.time(), "used": time.time()}
    merged = {"groups": 4, "calls": 96, "compared": 8, "singly": {"left_over": 2, "slower": 9}}
    assert "96 in 4, slower" in node_table([row | {"merged": merged}])
    assert " slower " in node_table([row | {"merged": merged | {"groups": 0, "calls": 0}}])


def test_sums_are_over_all_processes() -> None:
    with ReportFile() as file:
        with Path(file.path).open("a", encoding="utf-8") as lines:
            lines.write('{"graph_calls": 2, "local_calls": {"a": 1, "b": 1}, "compute_s": 0.5}\n')
            lines.write('{"graph_calls": 3, "local_calls": {"b": 2}, "compute_s": 0.25}\n')

        sums = summed_counts(file.reports(), DecisionCounts(hits=4, misses=2, evictions=1))

    assert sums["graph_calls"] == 5
    assert sums["local_calls"] == {"b": 3, "a": 1}
    assert sums["compute_s"] == 0.75
    assert sums["processes"] == 2
    assert (sums["loads"], sums["hits"], sums["evictions"]) == (2, 4, 1)


@pytest.mark.parametrize("command", [["exec"], ["models", "--address", "nowhere"]])
def test_bad_use_is_reported_in_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == EXIT_BAD_USE

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gpufaas {command[0]}: ")
    assert err.count("\n") == 1


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    shown = capsys.readouterr().out
    for command in ("exec", "gpu-manager", "models", "evict", "pin", "unpin", "simulate", "demo"):
        assert re.search(rf"^    {command}\b", shown, re.MULTILINE), command
