"""Whole programs under `gpufaas exec`, where something happens to the worker behind them."""

from pathlib import Path

from tests.kit.programs.executed_programs import KILL_WORKERS, ForkedPrograms, counts_of, execute


def test_call_is_answered_rightly_when_the_worker_was_killed_before(tmp_path: Path) -> None:
    program = f"""
import torch
{KILL_WORKERS}
torch.manual_seed(0)
model = torch.nn.Linear(4, 4).cuda().eval()
x = torch.ones(1, 4).cuda()
with torch.no_grad():
    before = model(x).cpu()
    assert kill_workers() >= 1
    after = model(x).cpu()
assert torch.equal(before, after)
"""
    counts = counts_of(program, tmp_path)
    assert counts["graph_calls"] == 2
    assert counts["loads"] == 2


def test_program_gets_torchs_out_of_memory_error_when_a_call_needs_too_much(
    tmp_path: Path,
) -> None:
    program = """
import torch
model = torch.nn.Linear(4, 20000).cuda()
with torch.no_grad():
    assert model(torch.ones(1, 4).cuda()).shape == (1, 20000)
    try:
        model(torch.ones(5000, 4).cuda()).sum()
    except torch.cuda.OutOfMemoryError as error:
        print("refused:", str(error).startswith("CUDA out of memory"))
    assert model(torch.ones(1, 4).cuda()).shape == (1, 20000)
"""
    done, counts = execute(program, tmp_path, "--gpu-memory", "160MiB")
    assert (done.returncode, done.stdout) == (0, "refused: True\n"), done.stderr
    assert counts["graph_calls"] == 2


def test_first_calls_run_locally_when_tracing_goes_on_in_the_background(tmp_path: Path) -> None:
    program = """
import time, torch
from torch_shim.process_report import report
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).cuda()
x = torch.ones(3, 4).cuda()
answers = []
ends_s = time.monotonic() + 150
with torch.no_grad():
    while time.monotonic() < ends_s and not report.counts.graph_calls:
        answers.append(model(x).cpu())
        time.sleep(0.05)
assert all(torch.allclose(answers[0], answer) for answer in answers)
"""
    done, counts = execute(program, tmp_path, "--tracing", "background")
    assert done.returncode == 0, done.stderr
    assert counts["local_calls"]["Dynamo is being imported"] >= 1
    assert counts["graph_calls"] >= 1


def test_every_thread_gets_its_own_answer_when_many_call_one_model(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import torch
from concurrent.futures import ThreadPoolExecutor
torch.manual_seed(0)
model = torch.nn.Linear(4, 4).cuda().eval()
weight, bias = model.weight.detach().cpu(), model.bias.detach().cpu()

def ask(number):
    x = torch.full((1, 4), float(number))
    with torch.no_grad():
        return torch.allclose(model(x.cuda()).cpu(), x @ weight.T + bias, atol=1e-5)

with ThreadPoolExecutor(6) as pool:
    print(sum(pool.map(ask, range(60))))
"""
    done, counts = programs.execute(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr
    assert counts["graph_calls"] == 60


def test_weights_are_one_copy_with_the_node_until_they_are_written_to(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import re
import torch

def resident_kib():
    found, inside = 0, False
    for line in open("/proc/self/smaps"):
        if re.match("[0-9a-f]+-", line):
            inside = "gpufaas-weights" in line or "gpufaas-image" in line
        elif inside and line.startswith("Private"):
            found += int(line.split()[1])
    return found

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).eval().cuda()
x = torch.ones(1, 1024).cuda()
with torch.no_grad():
    model(x)
    before = resident_kib()
    model[3].weight.mul_(2)
    model[3].bias.mul_(2)
    written = resident_kib()
    doubled = model(x).cpu()
    model.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    again = model(x).cpu()
print(before < 100, 4000 < written < 5000, torch.equal(doubled, again))
"""
    done, counts = programs.execute(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "True True True\n"), done.stderr
    assert counts["graph_calls"] == 3


def test_two_processes_with_the_same_weights_map_the_same_memory(tmp_path: Path) -> None:
    program = """
import re, subprocess, sys
import torch

def images():
    lines = [line.split() for line in open("/proc/self/maps") if "gpufaas-weights" in line]
    return sorted({line[4] for line in lines})

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).eval().cuda()
with torch.no_grad():
    total = model(torch.ones(1, 1024).cuda()).sum().item()
print(images(), total, flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "again"], check=True)
"""
    done, counts = execute(program, tmp_path)
    assert done.returncode == 0, done.stderr
    one, other = done.stdout.splitlines()
    assert one == other
    assert one.startswith("['")
    assert (counts["loads"], counts["hits"]) == (1, 1)
