"""The fork server's process: bound to its manager, and cut off from the network, before all else.

Run as `python -m gpu_manager.worker DESCRIPTOR PARENT`: its end of a socket pair with the
manager, and the manager's process.
"""

import importlib
import os
import sys

from gpu_manager.worker.sandbox import die_with, isolate

if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    missing = isolate()  # importing torch starts threads, and then some of it is too late
    # OpenMP threads that spin at a barrier hold cores which the function, or another worker, needs:
    # on two shared cores resnet18 ran two to six times slower than with threads that sleep there.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    importlib.import_module("gpu_manager.worker.forkserver").main(int(sys.argv[1]), missing)
