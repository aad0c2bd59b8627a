"""Device files of GPUs, which NVIDIA's driver opens to everybody: functions have none of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")

# A machine with a GPU, in a mount name space of its own: its devices answer like /dev/zero.
MACHINE = """
set -e
mount -t tmpfs none /dev
mknod -m 666 /dev/null c 1 3
mknod -m 666 /dev/urandom c 1 9
mknod -m 666 /dev/nvidia0 c 1 5
mkdir /dev/nvidia-caps
mknod -m 666 /dev/nvidia-caps/nvidia-cap1 c 1 5
exec "$@"
"""
# What a launched function of another user finds there.
LAUNCHING = """
import os, sys
from pathlib import Path
from gateway_ext.providers.process.launch import LaunchOrders, interpreter_folders, launch
looks = "print(os.getuid(), open('/dev/nvidia0', 'rb').read(1), os.listdir('/dev/nvidia-caps'))"
command = [sys.executable, "-I", "-S", "-c", "import os; " + looks]
visible = interpreter_folders(Path(sys.executable))
started = launch(LaunchOrders(command, {"LANG": "C.UTF-8"}, "/", 61_234, visible=visible))
print(os.fdopen(started.output).read())
started.process.wait()
print(open("/dev/nvidia0", "rb").read(1), os.listdir("/dev/nvidia-caps"))
"""


def test_function_finds_no_device_of_a_gpu_that_its_gateway_finds(tmp_path: Path) -> None:
    launching = tmp_path / "launching.py"
    launching.write_text(LAUNCHING)
    program = ("env", f"PYTHONPATH={ROOT}", sys.executable, str(launching))
    command = ["unshare", "--mount", "sh", "-c", MACHINE, "sh", *program]
    ran = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    in_function, here = filter(None, ran.stdout.splitlines())
    assert in_function == "61234 b'' []"
    assert here == "b'\\x00' ['nvidia-cap1']"
