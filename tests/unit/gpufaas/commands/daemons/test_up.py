"""What `gpufaas up` refuses before it starts anything, and what it says when it is up."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands.up import _policy_in_force, _welcome
from gpufaas.options.configuration import AllSettings
from gpufaas.options.shared import cluster_secret
from gpufaas.stack.part_commands import StackPlan
from gpufaas.stack_folder import StackFolder
from tests.kit.network.answering import answering

REFUSED = (
    (("--devices", "gpu:3"), "devices: 'gpu:3': auto, cuda, cuda:0,2 or cpu:N is expected"),
    (("--devices", "cuda:٣"), "devices: "),
    (("--devices", "cuda:4095"), "no "),  # driver, else GPU of this number
    (("--gpu-memory", "8XB"), "not a size: '8XB'"),
    (("--store-memory", "much"), "not a size: 'much'"),
    (("--gpu-overlap", "0"), "GPU overlap: '0'"),
    (("--gpu-slots", "9999"), "GPU slots: '9999'"),
    (("--spare-contexts", "-1"), "spare contexts: "),
    (("--emulate-load", "fast"), "emulated load: 'fast'"),
    (("--emulate-disk", "fast"), "emulated disk: "),
    (("--port", "99999"), "argument --port: '99999': a number from 1 to 65535 is expected"),
    (("--port", "0"), "argument --port: "),
    (("--port", "١٢"), "argument --port: "),
)


@pytest.mark.parametrize(("words", "why"), REFUSED, ids=lambda each: str(each[0])[2:])
def test_up_refuses_a_bad_value_before_it_starts_anything(
    words: tuple[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["up", "--state", str(tmp_path / "s"), *words])
    except SystemExit as refused:  # argparse
        code = int(refused.code or 0)
    assert code == EXIT_BAD_USE
    assert why in capsys.readouterr().err
    assert not list(tmp_path.glob("s/logs/*"))
    assert not (tmp_path / "s" / "etcd").exists()


def a_plan(tmp_path: Path, scheduler_url: str = "http://127.0.0.1:7700") -> StackPlan:
    folder = StackFolder(tmp_path)
    folder.credentials.mkdir()
    for name, text in (("user", "admin"), ("password", "s3cret")):
        (folder.credentials / f"basic-auth-{name}").write_text(text)
    cluster_secret(str(folder.secret_file), {}, make=True)
    return StackPlan(
        settings=replace(AllSettings(), policy="lalbo3"),
        folder=folder,
        environment={},
        config=None,
        node_name="here",
        node_metrics="127.0.0.1:7701",
        scheduler_url=scheduler_url,
        gateway_url="http://127.0.0.1:8080",
        etcd_urls=(),
        etcd_password=None,
    )


def test_up_says_what_to_export_when_its_folder_is_not_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(tmp_path)
    said = _welcome(plan, "lb", 1.0)
    assert f"export GPUFAAS_STATE={tmp_path}" in said
    assert "gpufaas token" in said
    assert "s3cret" not in said
    assert "was taken" not in said
    monkeypatch.setattr("gpufaas.commands.up.state_folder", lambda _: tmp_path)
    assert "export" not in _welcome(plan, "lb", 1.0)


def test_up_says_which_port_was_taken_and_where_the_part_is_instead(tmp_path: Path) -> None:
    said = _welcome(a_plan(tmp_path, "http://127.0.0.1:35129"), "lb", 1.0)
    file = tmp_path / "scheduler.port"
    keeps = f"{file} keeps this port for later starts (remove it for 127.0.0.1:7700)"
    assert f"scheduler at 127.0.0.1:35129: 127.0.0.1:7700 was taken; {keeps}" in said
    assert "metrics at" not in said


def test_up_says_the_policy_in_force_when_an_operator_has_chosen_another_one(
    tmp_path: Path,
) -> None:
    with answering(200, {"policy": "gain", "parameters": {"overlap": 0.0}}) as (url, _):
        policy = _policy_in_force(a_plan(tmp_path, url))
    assert policy == "gain overlap=0 (kept from `gpufaas policy set`; the settings say lalbo3)"


def test_up_says_the_settings_policy_when_the_scheduler_does_not_answer(tmp_path: Path) -> None:
    assert _policy_in_force(a_plan(tmp_path, "http://127.0.0.1:9")) == "lalbo3 by the settings"
