"""What the commands around a scheduler print, and who may give them."""

import errno
import json
import os
import re
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands import doctor
from gpufaas.commands.doctor import PartStatus, report
from gpufaas.commands.models import cluster_detail, cluster_table
from gpufaas.errors import CommandError
from gpufaas.options.shared import cluster_secret, default_secret_file
from gpufaas.output.cluster_text import cluster_text
from gpufaas.output.request_text import request_text
from gpufaas.stack.held_ports import claimed_port
from gpufaas.stack_folder import RunningStack, StackFolder

GIB = 1 << 30


def cluster(**more: Any) -> dict[str, Any]:
    """A cluster that has just begun."""
    begun = {
        "name": "s0", "term": 3, "store": "ok", "policy": "lalbo3", "parameters": {"o3_limit": 3},
        "waiting": 2, "waiting_locally": 1, "hits": 0, "misses": 0, "hit_ratio": None,
        "evictions": 0, "prefetches": 0, "ended": {}, "waits": None, "totals": None,
        "accuracy": None, "gpus": [],
    }  # fmt: skip
    return begun | more


def gpu(**more: Any) -> dict[str, Any]:
    """An idle GPU with five models."""
    sizes = {"a": 1, "b": 5, "c": 2, "d": 3, "e": 4}
    residents = [
        {"model": model, "memory_bytes": size * GIB, "pinned": model == "b"}
        for model, size in sizes.items()
    ]
    slot = {"leases": [], "queue": ["r1", "r2"]}
    shown = {
        "id": "n0/g0", "memory_bytes": 30 * GIB, "used_bytes": 15 * GIB, "draining": False,
        "silent": False, "residents": residents, "slots": [slot],
    }  # fmt: skip
    return shown | more


def ended_request(**more: Any) -> dict[str, Any]:
    """What the scheduler says of a request that completed."""
    ended = {
        "request": "r0", "function": "f", "models": ["bert"], "arrived_ago_s": 3.0,
        "waited_s": 0.0, "outcome": "completed", "reason": "", "total_s": 0.3, "decisions": [],
        "used": {"gpu_s": 0.25, "gpu_byte_s": GIB, "cost": None}, "rests": [],
    }  # fmt: skip
    return ended | more


# -- status -------------------------------------------------------------------------------------


def test_status_names_the_remedy_when_there_is_no_gpu() -> None:
    text = cluster_text(cluster())
    assert "s0 leads, term 3, state in ok; policy lalbo3 o3_limit=3" in text
    assert "waiting 2 (+1 for one GPU)" in text
    assert "gpufaas gpu-manager --scheduler" in text


def test_status_shows_the_largest_models_of_a_gpu_first() -> None:
    line = cluster_text(cluster(gpus=[gpu()])).splitlines()[-1]
    assert "##########.........." in line
    assert "15 GiB of 30 GiB" in line
    assert re.search(r"idle +2  b 5 GiB\*, e 4 GiB, d 3 GiB, c 2 GiB and 1 more$", line)


def test_status_says_how_a_model_is_hosted_where_that_is_not_the_usual_way() -> None:
    usual = {"memory_bytes": GIB, "pinned": False, "process_models": 1, "gpu_share": 1.0}
    residents = [
        {"model": "alone", **usual, "runtime": "process"},
        {"model": "loading", **usual, "runtime": None, "process_models": 0},
        {"model": "part", **usual, "runtime": "process", "gpu_share": 0.25},
        {"model": "together", **usual, "runtime": "stream", "process_models": 2},
    ]
    line = cluster_text(cluster(gpus=[gpu(residents=residents)])).splitlines()[-1]
    assert line.endswith(
        "alone 1 GiB, loading 1 GiB, part 1 GiB (process, 25 % of the GPU), "
        "together 1 GiB (stream of 2)"
    )


def test_status_names_a_models_functions_in_columns_as_wide_as_needed() -> None:
    wide = gpu(
        id="n0/g1", used_bytes=int(132.1 * 2**20), memory_bytes=int(5.461 * GIB), residents=[]
    )
    named = {"b": ["team/reader"], "e": [f"team/f{number}" for number in range(6)]}
    text = cluster_text(cluster(gpus=[gpu(), wide], functions=named))
    head, first, second = text.splitlines()[-3:]
    places = {
        line.index(word) for line, word in ((head, "STATE"), (first, "idle"), (second, "idle"))
    }
    assert len(places) == 1
    shown = "team/reader 5 GiB*, team/f0 + team/f1 + team/f2 + team/f3 + 2 more 4 GiB, d 3 GiB"
    assert shown in first


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"draining": True}, "draining"),
        ({"silent": True}, "silent"),
        ({"slots": [{"leases": [{"loading": ["a"]}], "queue": []}]}, "loading"),
        ({"slots": [{"leases": [{"loading": []}] * 2, "queue": []}]}, "busy 2"),
    ],
)
def test_status_shows_the_state_of_a_gpu(more: dict[str, Any], state: str) -> None:
    assert f"  {state} " in cluster_text(cluster(gpus=[gpu(**more)])).splitlines()[-1]


def test_status_shows_latencies_and_estimates_when_there_are_any() -> None:
    times = {"median_s": 0.0125, "p99_s": 1.5, "average_s": 0.02}
    accuracy = {"leases": 9, "estimated_s": 0.2, "measured_s": 0.25, "error_s": 0.05}
    counts = {"hits": 3, "misses": 1, "hit_ratio": 0.75, "ended": {"completed": 4}}
    text = cluster_text(cluster(waits=times, totals=times, accuracy=accuracy, **counts))
    assert "hit ratio 0.750" in text
    assert "ended: completed 4" in text
    assert "to a lease: median 12.5 ms, 99th percentile 1.50 s" in text
    assert "estimated 200.0 ms, measured 250.0 ms, off by 50.0 ms (average of 9 leases)" in text


def test_status_lists_leases_that_have_several_slots_or_a_configuration() -> None:
    usual = {"models": ["bert"], "loading": [], "more_slots": [], "configuration": None}
    wide = usual | {
        "more_slots": ["g0.1"],
        "configuration": {"batch": 4, "vcpus": 3, "vgpus": 2},
    }
    slots = [
        {"id": "g0.0", "leases": [wide], "queue": []},
        {"id": "g0.1", "leases": [], "queue": []},
        {"id": "g0.2", "leases": [usual], "queue": []},
    ]

    shown = cluster_text(cluster(gpus=[gpu(slots=slots)])).splitlines()

    assert shown[-1] == (
        "  lease of bert on g0.0, g0.1: configured for a batch of 4, with vCPUs: 3, slots: 2"
    )
    assert "busy 2" in shown[-2]


# -- explain and models ---------------------------------------------------------------------------


def test_explanation_shows_a_request_that_waited_for_one_gpu() -> None:
    candidate = {
        "slot": "g0", "idle": False, "cached": True, "frequency": 4, "wait_s": 0.5, "load_s": 0.0,
        "run_s": 0.25,
    }  # fmt: skip
    why = {
        "request": "r0", "decided_s": 9.0, "waited_s": 0.0, "policy": "lalbo3", "rule": "a hit",
        "chosen": "g0", "visits": 0, "queue_length": 1, "ahead": 0, "candidates": [candidate],
        "victims": [],
    }  # fmt: skip
    came = {
        "lease": 7, "load_s": 0.0, "loaded_from": {}, "failed_loads": {}, "run_s": 0.2, "runs": 1,
        "held_s": None,
    }  # fmt: skip
    decision = {"after_s": 0.0, "what": "queued", "rule": "a hit", "slot": "g0", "came": None}
    decision |= {"more_slots": [], "configuration": None}
    placed = {"what": "placed", "came": came, "estimate": {"load_s": 0.0, "run_s": 0.25}}
    text = request_text(
        {
            "request": "r0",
            "function": "f",
            "models": ["bert"],
            "arrived_ago_s": 3.0,
            "waited_s": 0.5,
            "outcome": None,
            "reason": "",
            "total_s": None,
            "used": {"gpu_s": 0.25, "gpu_byte_s": GIB / 2, "cost": 0.125},
            "decisions": [decision | {"why": why}, decision | placed | {"why": None}],
            "rests": [{"model": "bert", "stage": "context", "place": "g0", "leaves_in_s": 9.6}],
        }
    )  # fmt: skip
    assert "not ended yet; first lease after 0.500 s" in text
    assert "queued, g0, after 0.000 s: a hit" in text
    assert "<- chosen" in text
    assert "runs 0.200 s in 1, expected 0.250" in text
    assert "lease 7: in force" in text
    assert text.endswith("now: bert is in context of g0 for 10 s")
    assert "used 0.250 s of a GPU, 0.500 GiB s; cost 0.125000" in text


def test_explanation_shows_the_slots_and_the_configuration_of_a_placement() -> None:
    came = {
        "lease": 7, "load_s": 0.0, "loaded_from": {}, "failed_loads": {}, "run_s": 0.2, "runs": 1,
        "held_s": 0.25,
    }  # fmt: skip
    decision = {
        "after_s": 0.0, "what": "placed", "rule": "warm; in time", "slot": "g0.0", "why": None,
        "came": came, "estimate": {"load_s": 0.0, "run_s": 0.25}, "more_slots": ["g0.1", "g0.2"],
        "configuration": {"batch": 4, "vcpus": 2, "vgpus": 3},
    }  # fmt: skip
    text = request_text(ended_request(decisions=[decision]))
    assert text.splitlines()[4:6] == [
        "placed, g0.0, g0.1, g0.2, after 0.000 s: warm; in time",
        "  configured for a batch of 4, with vCPUs: 2, slots: 3",
    ]


def test_explanation_without_billing_leaves_out_what_the_request_used() -> None:
    text = request_text(ended_request(used=None))
    assert text.splitlines() == [
        "r0  function f, models bert, 3.0 s ago",
        "  completed after 0.300 s; first lease after 0.000 s",
    ]


def test_models_are_shown_with_their_holders() -> None:
    hosting = {"runtime": "stream", "process_models": 3, "gpu_share": 0.5}
    holder = {"gpu": "g0", "leases": 1, "waiting": 2, "pinned": True} | hosting
    model = {
        "model": "team/bert", "functions": ["team/reader", "team/writer"],
        "memory_bytes": GIB, "load_s": {"host": 0.21, "disk": 1.4},
        "run_s": {"1 on any": 0.02}, "rate": 0.5, "waiting": 3, "holders": [holder],
        "rests": [
            {"stage": "context", "place": "g0", "leaves_in_s": 12.4},
            {"stage": "host", "place": "node1", "leaves_in_s": None},
        ],
    }  # fmt: skip
    head, line = cluster_table([model]).splitlines()
    assert head.split()[:3] == ["MODEL", "FUNCTIONS", "NEEDS"]
    assert re.split(r"  +", line) == [
        "team/bert", "team/reader + team/writer", "1 GiB", "g0*",
        "stream of 3, 50 % of the GPU", "1", "5",
        "0.21 host, 1.4 disk", "0.02 1 on any", "30.0", "context of g0 for 12 s, host of node1",
    ]  # fmt: skip


def test_one_model_is_shown_with_its_times_by_configuration() -> None:
    model = {
        "model": "team/bert", "memory_bytes": GIB, "load_s": {}, "run_s": {"1 on H200 1/7": 0.02},
        "rate": 0.5, "waiting": 0, "holders": [],
        "configured": [
            {"batch": 4, "vcpus": 2, "vgpus": 3, "gpu_type": "H200 1/7", "run_s": 0.03125},
        ],
        "features": {"ipc": 2.5e9, "gpu_utilization": 0.25},
    }  # fmt: skip
    facts, configured, uses = cluster_detail(model).split("\n\n")
    assert re.search(r"^RUN +0\.02 1 on H200 1/7$", facts, re.MULTILINE)
    assert [re.split(r"  +", line) for line in configured.splitlines()] == [
        ["BATCH", "VCPUS", "VGPUS", "GPU TYPE", "RUN"],
        ["4", "2", "3", "H200 1/7", "0.0312 s"],
    ]
    assert [line.split() for line in uses.splitlines()[1:]] == [
        ["ipc", "2.5e+09"],
        ["gpu_utilization", "0.25"],
    ]
    assert cluster_detail(model | {"configured": [], "features": {}}) == facts


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_explains_how_to_get_missing_parts() -> None:
    fine = PartStatus("python", "ok", "3.11.7", "everything")
    missing = PartStatus("torch", "lacks", "not installed", "GPU managers", "pip install torch")
    text = report([fine, missing])
    assert re.search(r"^LACKS +torch +not installed +GPU managers$", text, re.MULTILINE)
    assert text.endswith("torch: pip install torch")
    assert report([fine]).endswith("Nothing is missing.")


def test_doctor_fails_when_something_needed_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optional = PartStatus("docker", "optional", "none", "images", "install it")
    monkeypatch.setattr(doctor, "examine", lambda: iter([optional]))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "docker"
    old = PartStatus("python", "old", "3.9", "everything", "install 3.11")
    monkeypatch.setattr(doctor, "examine", lambda: iter([optional, old]))
    assert main(["doctor"]) == 1


def test_doctor_says_what_is_up_and_which_ports_are_taken(tmp_path: Path) -> None:
    environment = {"GPUFAAS_STATE": str(tmp_path / "state")}
    found = {each.name: each for each in doctor.examine_room(environment)}
    assert found["stack"].found == f"nothing is up in {tmp_path / 'state'}"
    assert found["disk"].found.endswith(f"free in {tmp_path}")
    assert "ports" in found
    with ExitStack() as stack:
        with suppress(CommandError):  # another program may have it
            stack.enter_context(claimed_port("127.0.0.1:7700", "a test", "nothing"))
        taken = {each.name: each for each in doctor.examine_room(environment)}["ports"]
    assert (taken.state, "127.0.0.1:7700" in taken.found) == ("optional", True)
    folder = StackFolder(tmp_path / "state")
    folder.make()
    with folder.held():
        starts = {each.name: each for each in doctor.examine_room(environment)}
        assert starts["stack"].found == f"starting in {folder.root} (process {os.getpid()})"
        folder.record(RunningStack(1, "http://g", "http://s", "unix:/n"))
        up = {each.name: each for each in doctor.examine_room(environment)}
    assert up["stack"].found == f"up in {tmp_path / 'state'}: http://g, http://s"
    assert "ports" not in up


def test_doctor_reports_a_state_folder_that_is_none_as_it_does_other_parts() -> None:
    found = {each.name: each for each in doctor.examine_room({"GPUFAAS_STATE": "/dev/null"})}
    assert found.keys() == {"stack", "ports", "disk", "shared memory"}
    assert (found["stack"].state, found["stack"].found) == (
        "lacks",
        "/dev/null/lock: Not a directory",
    )
    assert "GPUFAAS_STATE" in found["stack"].remedy


def test_doctor_sees_the_disk_when_the_folder_is_in_one_that_may_not_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, stat, usage = tmp_path / "root's" / "state", Path.stat, shutil.disk_usage

    def check(path: Path) -> None:
        if path == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def hiding_stat(path: Path, **more: Any) -> os.stat_result:
        check(path)
        return stat(path, **more)

    def hiding_usage(path: Path) -> Any:
        check(path)
        return usage(path)

    monkeypatch.setattr(Path, "stat", hiding_stat)
    monkeypatch.setattr(shutil, "disk_usage", hiding_usage)
    found = {each.name: each for each in doctor.examine_room({"GPUFAAS_STATE": str(hidden)})}
    assert found["disk"].found.endswith(f" free in {tmp_path}")


def test_doctor_examines_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["python"].state == "ok"
    assert found["docker"].state == found["faas-cli"].state == "optional"
    assert "gpufaas" in found["torch"].remedy or found["torch"].state == "ok"
    assert all(finding.remedy for finding in found.values() if finding.state != "ok")


# -- credentials ----------------------------------------------------------------------------------


def test_token_is_the_same_for_all_holders_of_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*words: str) -> str:
        assert main(["token", "--secret-file", str(tmp_path / "secret"), *words]) == 0
        return capsys.readouterr().out

    cluster_secret(str(tmp_path / "secret"), {}, make=True)
    assert printed() == printed()
    assert printed() != printed("--caller")
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "words", [["token"], ["policy", "get", "--scheduler", "http://127.0.0.1:9"]]
)
def test_reader_of_a_secret_makes_none_when_the_file_is_missing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "folder" / "typo"
    assert main([*words, "--secret-file", str(missing)]) == EXIT_BAD_USE
    assert f"secret file '{missing}': there is no such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_secret_is_looked_for_where_this_user_keeps_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    found = default_secret_file({"XDG_STATE_HOME": "/home/me/state"})
    assert found == Path("/home/me/state/gpufaas/secret")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_secret_file({}) == Path("/var/lib/gpufaas/secret")
