"""The fork server's process: bound to its manager, and cut off from the network, before all else.

Run as `python -m gpu_manager.worker PARENT DEVICES DESCRIPTOR [POOL]`: the manager's process, `cpu`
where all GPUs are emulated, the descriptor of its end of a socket pair with the manager, and that
of the library of emulated GPUs' pools.
"""

import gc
import importlib
import os
import sys

from gpu_manager.worker.sandbox import die_with, isolate

if __name__ == "__main__":
    parent, devices, *descriptors = sys.argv[1:]
    die_with(int(parent))
    missing = isolate()  # importing torch starts threads, and then some of it is too late
    # How long OpenMP threads spin at a barrier before they sleep. For ever (the default comes near)
    # they hold cores that the function needs: two resnet18s on two cores took 95 ms a call. With
    # no spinning each took 43, but one alone 47 instead of 26. This many: 75 and 30.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    gc.disable()  # until all is imported: what an import makes stays
    server = importlib.import_module("gpu_manager.worker.fork_server")
    server.main(
        [int(text) for text in descriptors],
        missing,
        emulated=devices == "cpu",
        keeps_stderr=bool(os.environ.get("GPUFAAS_WORKER_STDERR")),
    )
