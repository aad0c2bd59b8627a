"""A template that computes at import has no thread pool; its forks have theirs."""

import json
import subprocess
import sys

from tests.kit.processes.runtime_process import runtime

# Both libraries compute with as many threads as they may, at import and in each call.
_COMPUTING = """
import json, os
import numpy as np
import torch
IMPORTED_BY = os.getpid()
def computed():
    both = torch.ones(700, 700) @ torch.ones(700, 700), np.ones((700, 700)) @ np.ones((700, 700))
    return [float(one.sum()) for one in both]
MADE = computed()
def handle(event, context):
    return {
        "forked": os.getpid() != IMPORTED_BY, "threads": torch.get_num_threads(),
        "same": computed() == MADE, "levels": os.environ.get("OMP_NUM_THREADS", ""),
    }
"""


def test_fork_computes_with_the_threads_of_a_process_of_its_own() -> None:
    counted = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    done = subprocess.run(counted, env={}, capture_output=True, check=True, text=True)
    with runtime(_COMPUTING, workers=2) as running:
        found = json.loads(running.call().body)
    threads = int(done.stdout)
    assert found == {"forked": True, "threads": threads, "same": True, "levels": ""}
