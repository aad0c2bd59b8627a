"""A wall clock of a host's own, which jumps when it is told to; processes start under it.

Moved is what libc tells of CLOCK_REALTIME, so in every Python process of ours, not in etcd, and not
in functions, whose environment the gateway makes anew. The monotonic clocks go on as they are.
"""

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.kit.cache import made_once

_SOURCE = Path(__file__).with_name("shifted_clock.c")
_NANOSECONDS = 1_000_000_000


class ShiftedClock:
    """One host's; `environment` is what its processes need."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed_s = 0.0
        self._file.write_bytes(struct.pack("=q", 0))
        self._file.chmod(0o644)

    @property
    def environment(self) -> Mapping[str, str]:
        """For every process that is to be under this clock."""
        return {"LD_PRELOAD": str(_library()), "CAMPAIGN_CLOCK": str(self._file)}

    def jump(self, seconds: float) -> None:
        """From now on the clock is wrong by so much; 0 puts it right."""
        shift = int((self._passed_s + seconds) * _NANOSECONDS)
        with self._file.open("r+b") as file:  # mapped: the file must stay the same
            file.write(struct.pack("=q", shift))

    def pass_time(self, seconds: float) -> None:
        """Have so much time pass, and the clock be right."""
        self._passed_s += seconds
        self.jump(0.0)


def _library() -> Path:
    def compiled(target: Path) -> None:
        command = ["cc", "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(target), "-ldl"]
        subprocess.run(command, check=True)

    return made_once("shifted_clock.so", _SOURCE.read_bytes(), compiled)
