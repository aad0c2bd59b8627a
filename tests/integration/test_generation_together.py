"""Texts that threads of a function write with one model on a node: their steps run as one."""

import os
import subprocess
import sys

import pytest

from common.gpu_wishes import AS_MEASURED, GpuWishes
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.node.settings import EmulatedTimes
from tests.kit.nodes.node_thread import NodeThread, merges, node_thread
from tests.kit.waiting import wait_until

WRITERS = 6
# Each thread writes texts of its own lengths; all of them are compared with torch's own.
PROGRAM = f"""
import random, sys, threading, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
how = dict(do_sample=False, pad_token_id=0)
if sys.argv[1] == "static":
    how |= dict(cache_implementation="static", disable_compile=True)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4)).eval()

def write(prompt, count):
    return model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **how).tolist()

chance = random.Random(3)
texts = [
    [(torch.randint(0, 128, (1, chance.randint(20, 40))), chance.randint(4, 12)) for _ in range(3)]
    for _ in range({WRITERS})
]
expected = [[write(*text) for text in each] for each in texts]
model = model.cuda()
for prompt, count in texts[0]:
    write(prompt.cuda(), count)
wrong = []

def run(number):
    torch.set_grad_enabled(False)
    for (prompt, count), known in zip(texts[number], expected[number]):
        if write(prompt.cuda(), count) != known:
            wrong.append(number)

threads = [threading.Thread(target=run, args=(number,)) for number in range({WRITERS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
from torch_shim.process_report import report
print(wrong, report.counts.local_operators)
"""


def _environment(node: NodeThread) -> dict[str, str]:
    identity = FunctionIdentity("team", "writer", GpuWishes(merged=AS_MEASURED))
    credential = node.run(lambda it: it.manager.credentials.issue(identity))
    return node.environment(os.environ, credential)  # noqa: TID251 - a process of the test's


@pytest.mark.parametrize("cache", ["growing", "static"])
def test_texts_are_those_of_torch_when_their_steps_run_as_one(cache: str) -> None:
    with node_thread(1024, gpu_overlap=WRITERS, emulation=EmulatedTimes(run_s=0.02)) as node:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, cache],
            env=_environment(node),
            capture_output=True,
            text=True,
            timeout=270,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "[] 0\n"), done.stderr
        wait_until(lambda: node.run(merges).groups, "groups are reported")
        found = node.run(merges)
        assert found.calls >= 2 * found.groups
        assert "differs" not in found.singly
