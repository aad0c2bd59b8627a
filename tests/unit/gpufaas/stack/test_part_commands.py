"""The command lines of a stack's programs."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpufaas.commands import gpu_manager
from gpufaas.options.configuration import AllSettings, StackNode
from gpufaas.stack.part_commands import StackPlan
from gpufaas.stack_folder import StackFolder


def plan(node: StackNode) -> StackPlan:
    return StackPlan(
        settings=replace(AllSettings(), node=node),
        folder=StackFolder(Path("/state")),
        environment={},
        config=None,
        node_name="here",
        node_metrics="",
        scheduler_url="http://127.0.0.1:7700",
        gateway_url="http://127.0.0.1:8080",
        etcd_urls=(),
        etcd_password=None,
    )


def prepares(command: Sequence[str]) -> str:
    """What the GPU manager understands."""
    commands = argparse.ArgumentParser().add_subparsers()
    gpu_manager.add_parser(commands)
    options = commands.choices["gpu-manager"].parse_args(
        command[command.index("gpu-manager") + 1 :]
    )
    chosen: str = options.prepare
    return chosen


def test_gpu_manager_prepares_for_the_first_function_and_at_once_when_it_is_started_again() -> None:
    part = plan(StackNode()).node()
    assert prepares(part.command) == "first-use"
    assert prepares(part.command_again) == "start"


@pytest.mark.parametrize("name", ["scheduler", "gateway"])
def test_other_parts_are_started_again_as_before(name: str) -> None:
    assert getattr(plan(StackNode()), name)().command_again == ()


def test_gpu_manager_prepares_at_its_start_when_the_settings_say_so() -> None:
    assert prepares(plan(StackNode(prepare="start")).node().command) == "start"


def test_gpu_manager_prepares_at_its_start_when_nobody_says_anything() -> None:
    assert prepares(["gpu-manager"]) == "start"
