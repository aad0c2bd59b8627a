"""Concurrent calls of one model on a node: run as one, forbidden, and repeated after a crash."""

import threading
from pathlib import Path

import pytest

from common.gpu_wishes import AS_MEASURED, UNMERGED, USUAL, GpuWishes
from common.telemetry.metrics import Values
from gpu_manager import metrics
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.node.settings import EmulatedTimes
from tests.kit.nodes.manager_client import SealedWeights, model
from tests.kit.nodes.node_thread import NodeThread, merges, node_thread
from tests.kit.nodes.worker_client import ADD, FunctionClient
from tests.kit.programs.executed_programs import KILL_WORKERS, execute
from tests.kit.waiting import wait_until
from torch_shim.wire.programs import Program, ProgramStep, Ref, Tuple

CLIENTS, CALLS = 6, 12
SUMS = [[number + 1.0] * 4 for number in range(CLIENTS) for _ in range(CALLS)]
# A histogram of four equal numbers, which torch makes of one call after the other under vmap.
HISTOGRAM = Program(
    2,
    (),
    (ProgramStep("t:torch.histc", [Ref(0), 4]), ProgramStep("o:add", [Ref(2), Ref(1)])),
    Tuple([Ref(3)]),
)


def call_all(
    node: NodeThread, image: SealedWeights, wishes: GpuWishes, what: Program = ADD
) -> list[list[float]]:
    """What clients of one function get that call at the same time, each with its own numbers."""
    identity = FunctionIdentity("team", "function", wishes)
    credential = node.run(lambda it: it.manager.credentials.issue(identity))
    clients = [FunctionClient(node.address, credential) for _ in range(CLIENTS)]
    clients[0].upload(image)
    answers: list[list[float]] = []

    def call(number: int) -> None:
        clients[number].acquire(image)
        answers.extend(clients[number].call(image, what, float(number)) for _ in range(CALLS))
        clients[number].release()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    return sorted(answers)


@pytest.mark.parametrize("runtime", ["process", "stream"])
def test_calls_of_several_leases_run_as_one_and_are_counted(runtime: str) -> None:
    image = model(1.0)
    with node_thread(gpu_overlap=CLIENTS, emulation=EmulatedTimes(run_s=0.02)) as node:
        learn(node, image, GpuWishes(runtime, merged=AS_MEASURED))
        found, meters = node.run(lambda it: (merges(it), list(it.manager.node.meters.families())))
        assert found.calls >= 2 * found.groups
        assert found.compared >= 4
        (calls,) = (each for each in meters if each.metric is metrics.MERGED_CALLS)
        assert isinstance(calls, Values)
        assert sum(calls.values.values()) == found.calls
    image.close()


def test_calls_run_singly_when_the_deployment_forbids_groups() -> None:
    image = model(1.0)
    with node_thread(gpu_overlap=CLIENTS, emulation=EmulatedTimes(run_s=0.01)) as node:
        assert call_all(node, image, GpuWishes(merged=UNMERGED)) == SUMS
        wait_until(lambda: node.run(merges).singly.get("off"), "the reason is reported")
        assert node.run(merges).groups == node.run(merges).compared == 0
    image.close()


def test_a_program_runs_singly_and_is_named_when_its_calls_cannot_be_merged() -> None:
    image = model(1.0)
    expected = [[1.0, 1.0, 5.0, 1.0]] * (CLIENTS * CALLS)
    with node_thread(gpu_overlap=CLIENTS, emulation=EmulatedTimes(run_s=0.01)) as node:
        assert call_all(node, image, GpuWishes(), HISTOGRAM) == expected
        wait_until(lambda: node.run(merges).never, "the program is reported")
        assert list(node.run(merges).never.values()) == ["no_batching_rule"]
        found = node.run(merges)
        assert not found.compared
        assert not found.groups
    image.close()


def learn(
    node: NodeThread,
    image: SealedWeights,
    wishes: GpuWishes = USUAL,
    rounds: int = 8,
    groups: int = 5,
) -> None:
    """Call until groups pay; on a busy machine few calls of one round come at the same time."""
    for _ in range(rounds):
        assert call_all(node, image, wishes) == SUMS
        if node.run(merges).groups >= groups:
            return
    raise AssertionError(f"no groups: {node.run(merges)}")


def test_members_are_repeated_singly_when_their_worker_is_killed(tmp_path: Path) -> None:
    program = f"""
import threading, time
import torch
{KILL_WORKERS}
torch.manual_seed(0)
model = torch.nn.Linear(4, 4).cuda().eval()
weight, bias = model.weight.detach().cpu(), model.bias.detach().cpu()
right = []

def ask(number, over):
    torch.set_grad_enabled(False)
    while not over.is_set():
        x = torch.full((1, 4), float(number))
        right.append(torch.allclose(model(x.cuda()).cpu(), x @ weight.T + bias, atol=1e-5))

over = threading.Event()
threads = [threading.Thread(target=ask, args=(number, over)) for number in range(6)]
for thread in threads:
    thread.start()
while len(right) < 60:
    time.sleep(0.05)
from torch_shim.process_report import report
repeated = killed = 0
while repeated < 2:  # where this process is held up at the kill, no calls may be under way
    before, answered = report.counts.repeated_calls, len(right)
    killed += kill_workers()
    while len(right) < answered + 30:
        time.sleep(0.05)
    repeated = report.counts.repeated_calls - before
over.set()
for thread in threads:
    thread.join()
print(all(right), killed > 0)
"""
    done, counts = execute(program, tmp_path, "--emulate-run", "0.1")
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
    assert counts["graph_calls"] >= 90
