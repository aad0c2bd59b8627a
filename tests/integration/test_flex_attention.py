"""flex_attention without torch.compile, as the first thing that a process computes."""

import subprocess
import sys

from tests.kit.programs.snippets import shim_environment

_PROGRAM = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
q = torch.randn(1, 2, 16, 8)
wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="cuda")
found = flex_attention(q.cuda(), q.cuda(), q.cuda(), block_mask=mask)
assert found.is_cuda
torch.testing.assert_close(found.cpu(), wanted)
"""


def test_flex_attention_runs_uncompiled_when_it_is_used_first() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        env=shim_environment(GPUFAAS_CAPTURE="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
