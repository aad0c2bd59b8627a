"""A fork of a process that has traced a model answers from its graphs, in sessions of its own."""

import json
import subprocess
import sys
from typing import Any

EXEC = [sys.executable, "-m", "gpufaas", "exec", "--devices", "cpu:1", "--gpu-memory", "400MiB"]
_PROGRAM = """
import json, os, time
import torch
from torch_shim.capture import module_calls
from torch_shim.process_report import report
from torch_shim import weights

hashed = []
for name in ("image_digest", "possession_proof"):
    def noted(*args, name=name, native=getattr(weights, name)):
        hashed.append(name)
        return native(*args)
    setattr(weights, name, noted)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.ReLU(), torch.nn.Linear(600, 2))
model = model.eval().cuda()
given = torch.ones(1, 600, device="cuda")

def answer():
    with torch.no_grad():
        return model(given)

module_calls.import_tracing()
kept = answer()
held = answer()
module_calls.close_sessions()
def threads():
    return [name for task in os.listdir("/proc/self/task") if (name := thread_name(task))]
def thread_name(task):
    try:
        return open(f"/proc/self/task/{task}/comm").read().strip()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended since it was listed
        return ""
deadline = time.monotonic() + 60
while any(name.startswith("gpufaas") for name in threads()) and time.monotonic() < deadline:
    time.sleep(0.01)
left = [name for name in threads() if name.startswith("gpufaas")]
rows = []
for _ in range(2):
    read, write = os.pipe()
    if not os.fork():
        module_calls.trace_in_background()
        hashed.clear()
        found = [answer().tolist(), held.tolist()]
        counts = report.counts
        row = {"found": found, "graphs": counts.graphs, "calls": counts.graph_calls,
               "local": counts.local_calls, "hashed": hashed}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.wait()
    os.close(write)
    rows.append(json.loads(os.read(read, 65536)))
again = answer()
print(json.dumps({"left": left, "kept": kept.tolist(), "again": again.tolist(), "rows": rows}))
"""
_NEW_MODEL = """
import json, os
import torch
from torch_shim.capture import module_calls
from torch_shim.process_report import report

module_calls.import_tracing()
module_calls.close_sessions()
read, write = os.pipe()
if not os.fork():
    module_calls.trace_in_background()
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)).eval().cuda()
    with torch.no_grad():
        model(torch.ones(1, 6, device="cuda"))
    counts = report.counts
    os.write(write, json.dumps([counts.local_calls, counts.graph_calls]).encode())
    os._exit(0)
os.wait()
print(os.read(read, 65536).decode())
"""


def test_forks_answer_from_the_graphs_of_their_parent_whose_sessions_are_closed() -> None:
    found = _found_by(_PROGRAM)
    assert found["left"] == [], "no thread keeps the process from being forked"
    assert found["again"] == found["kept"]
    for row in found["rows"]:
        assert row["found"] == [found["kept"], found["kept"]]
        assert (row["graphs"], row["calls"], row["local"]) == (0, 1, {})
        assert row["hashed"] == [], "what the parent has proven is not proven again"


def test_parts_are_no_roots_of_their_own_when_a_fork_calls_a_new_model() -> None:
    local_calls, graph_calls = _found_by(_NEW_MODEL)
    assert (local_calls, graph_calls) == ({"its graph is being traced": 1}, 0)


def _found_by(program: str) -> Any:
    done = subprocess.run(
        [*EXEC, "--", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
