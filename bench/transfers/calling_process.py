"""Transfers of calls alone, as a worker makes them: prints the seconds of each.

`python -m bench.transfers.calling_process GATE SPEED BLOCK SIZE TIMES`
"""

import random
import sys
import time

from gpu_manager.devices.loads import TransferRank
from gpu_manager.worker.transfers.path import PathSpeed, TransferPath
from gpu_manager.worker.transfers.process_gate import ProcessGate


def main() -> None:
    """Make the transfers, at moments that do not follow the blocks of others."""
    gate, speed, block, size, times = sys.argv[1:]
    path = TransferPath(PathSpeed(float(speed), int(block)), ProcessGate(int(gate)))
    chance = random.Random(17)
    rest_s = int(size) / float(speed)
    print("ready", flush=True)
    for _ in range(int(times)):
        time.sleep(chance.random() * rest_s)
        begin_s = time.perf_counter()
        path.transfer("call", TransferRank.CALL).move(int(size))
        print(time.perf_counter() - begin_s, flush=True)


if __name__ == "__main__":
    main()
