"""A plain program on a real card, under `gpufaas exec` and by itself: the same answers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
_PROGRAM_S = 55.0  # two of them within the 120 s that a test has on a machine with a GPU

PROGRAM = """
import sys
import torch
from torchvision.models import resnet18

torch.backends.cudnn.allow_tf32 = False  # whose numbers depend on the algorithm that is chosen
torch.manual_seed(0)
model = resnet18().eval().to("cuda")
inputs = torch.rand(3, 2, 3, 224, 224)
with torch.no_grad():
    torch.save([model(one.to("cuda")).cpu() for one in inputs], sys.argv[1])
"""


def test_program_answers_as_it_does_by_itself(tmp_path: Path) -> None:
    script, alone, shared = tmp_path / "program.py", tmp_path / "alone.pt", tmp_path / "shared.pt"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script)]
    subprocess.run([*command, str(alone)], check=True, timeout=_PROGRAM_S)
    under = [sys.executable, "-m", "gpufaas", "exec", "--devices", "cuda", "--"]
    subprocess.run([*under, *command, str(shared)], check=True, timeout=_PROGRAM_S)
    expected, found = torch.load(alone), torch.load(shared)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
