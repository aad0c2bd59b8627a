"""The fork server's process: bound to its manager, and cut off from the network, before all else.

Run as `python -m gpu_manager.worker DESCRIPTOR PARENT DEVICES`: its end of a socket pair with the
manager, the manager's process, and `cpu` where all GPUs are emulated.
"""

import importlib
import os
import sys

from gpu_manager.worker.sandbox import die_with, isolate

if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    missing = isolate()  # importing torch starts threads, and then some of it is too late
    # How long OpenMP threads spin at a barrier before they sleep. For ever (the default comes near)
    # they hold cores that the function needs: two resnet18s on two cores took 95 ms a call. With
    # no spinning each took 43, but one alone 47 instead of 26. This many: 75 and 30.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    server = importlib.import_module("gpu_manager.worker.fork_server")
    server.main(int(sys.argv[1]), missing, emulated=sys.argv[3] == "cpu")
