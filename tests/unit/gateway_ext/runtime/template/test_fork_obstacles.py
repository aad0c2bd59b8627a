"""What of the shim's keeps no process from being forked."""

import subprocess
import sys

# OpenBLAS has no pool that would have to be ended.
_HOLDS_A_BLOCK = """
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
from gateway_ext.runtime.template import forks
from gateway_ext.runtime.template.forks import SingleThread

threads = SingleThread()
from torch_shim.wire.shared_memory import LEAST_BLOCK_BYTES, shared_blocks

storage = shared_blocks.storage(LEAST_BLOCK_BYTES)
print(forks.obstacle({0, 1, 2}))
"""


def test_large_tensor_on_the_gpu_is_no_obstacle_when_a_fork_makes_its_block_private() -> None:
    run = [sys.executable, "-c", _HOLDS_A_BLOCK]
    told = subprocess.run(run, capture_output=True, text=True, check=True)
    assert told.stdout == "\n"
