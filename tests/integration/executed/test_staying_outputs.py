"""Whole programs under `gpufaas exec` whose large outputs stay with the worker."""

from pathlib import Path

import pytest

from tests.kit.places import ROOT
from tests.kit.programs.executed_programs import KILL_WORKERS, ForkedPrograms, counts_of

# A cache that grows by a row in each step, as that of a language model does.
GROWING = """
import torch

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)

    def forward(self, x, cache):
        cache = torch.cat([cache, self.layer(x)])
        return cache.sum(0, keepdim=True).tanh(), cache

def run(step, x, cache, steps):
    with torch.no_grad():
        for _ in range(steps):
            x, cache = step(x, cache)
    return x, cache

torch.manual_seed(0)
step = Step().eval()
x, cache = torch.randn(1, 512), torch.randn(256, 512)
expected, grown = run(step, x, cache, 40)
step = step.cuda()
"""


def test_bytes_that_cross_do_not_grow_when_a_cache_does(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{GROWING}
got, there = run(step, x.cuda(), cache.cuda(), 40)
assert torch.equal(got.cpu(), expected)
del there
"""
    counts = programs.counts_of(program, tmp_path)
    assert counts["graph_calls"] == 40
    cache_bytes = 256 * 512 * 4
    assert counts["bytes_out"] < cache_bytes  # each of the forty caches is larger
    assert counts["bytes_in"] < 2 * cache_bytes  # it is sent once


def test_cache_is_what_it_would_be_when_somebody_looks_at_it_now_and_then(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{GROWING}
x, cache = x.cuda(), cache.cuda()
for _ in range(8):
    x, cache = run(step, x, cache, 5)
    assert cache[-1].cpu().isfinite().all()
    cache = cache.index_select(0, torch.arange(cache.size(0)).cuda())
assert torch.equal(cache.cpu(), grown) and torch.equal(x.cpu(), expected)
"""
    programs.counts_of(program, tmp_path)


def test_cache_is_brought_back_when_its_model_is_evicted_and_loaded_again(tmp_path: Path) -> None:
    program = f"""
{GROWING}
other = torch.nn.Linear(3000, 3000).cuda()
x, cache = x.cuda(), cache.cuda()
for _ in range(4):
    x, cache = run(step, x, cache, 10)
    with torch.no_grad():
        other(torch.ones(1, 3000).cuda()).sum().item()
assert torch.equal(cache.cpu(), grown) and torch.equal(x.cpu(), expected)
"""
    counts = counts_of(program, tmp_path, "--gpu-memory", "100MiB")
    assert counts["loads"] >= 3, "the model with the cache was not evicted"


def test_cache_is_computed_again_when_the_worker_died_with_it(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{GROWING}
{KILL_WORKERS}
x, cache = x.cuda(), cache.cuda()
got, there = x, cache
for number in range(8):
    got, there = run(step, got, there, 5)
    if number in (1, 4, 7):
        assert kill_workers() >= 1
assert torch.equal(there.cpu(), grown) and torch.equal(got.cpu(), expected)
"""
    counts = programs.counts_of(program, tmp_path)
    assert 40 < counts["graph_calls"] <= 40 + 10 + 25 + 40  # all before each death


def test_cache_that_began_with_equal_elements_is_computed_again_when_the_function_dropped_them(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{GROWING}
{KILL_WORKERS}
import gc
x = torch.randn(1, 512)
for fill in (0.0, -0.0, 1.5, float("nan")):
    step.cpu()
    expected, grown = run(step, x, torch.full((256, 512), fill), 10)
    step.cuda()
    there = torch.full((256, 512), fill, device="cuda")
    got = x.cuda()
    for number in range(2):
        got, there = run(step, got, there, 5)
        gc.collect()
        assert kill_workers() >= 1
    assert torch.equal(there.view(torch.int32).cpu(), grown.view(torch.int32))
    assert torch.equal(got.view(torch.int32).cpu(), expected.view(torch.int32))
"""
    programs.counts_of(program, tmp_path)


def test_cache_that_came_while_it_was_small_is_computed_again(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{GROWING}
{KILL_WORKERS}
import gc
x, cache = torch.randn(1, 512), torch.randn(4, 512)
step.cpu()
expected, grown = run(step, x, cache, 45)
step.cuda()
x, cache = x.cuda(), cache.cuda()
for steps in (20, 20, 5):  # 48 KiB, 88 KiB
    x, cache = run(step, x, cache, steps)
    gc.collect()
    assert kill_workers() >= 1
assert torch.equal(cache.cpu(), grown) and torch.equal(x.cpu(), expected)
"""
    programs.counts_of(program, tmp_path)


def test_cache_stays_with_the_next_worker_when_one_died(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{GROWING}
{KILL_WORKERS}
x, cache = x.cuda(), cache.cuda()
first, there = run(step, x, cache, 5)
assert kill_workers() >= 1
got, there = run(step, first, there, 35)
assert torch.equal(got.cpu(), expected)
del there
"""
    counts = programs.counts_of(program, tmp_path)
    cache_bytes = 261 * 512 * 4
    assert counts["bytes_out"] < 2 * cache_bytes  # what was computed again came once
    assert counts["bytes_in"] < 4 * cache_bytes


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("del cache", "is gone, or was written to"),
        ("cache.add_(1)", "is gone, or was written to"),
        ("step.layer.weight.mul_(2)", "the weights that it was computed with have changed"),
        ("torch.set_float32_matmul_precision('high')", "other settings"),
    ],
)
def test_error_says_why_when_a_cache_cannot_be_computed_again(
    programs: ForkedPrograms, spoil: str, reason: str, tmp_path: Path
) -> None:
    program = f"""
import gc
{GROWING}
{KILL_WORKERS}
torch.set_grad_enabled(False)
x, cache = x.cuda(), cache.cuda()
first, there = run(step, x, cache, 5)
{spoil}
gc.collect()
assert kill_workers() >= 1
for use in (lambda: there.cpu(), lambda: run(step, first, there, 1)):
    try:
        use()
    except RuntimeError as error:
        assert "CUDA error: worker lost" in str(error), error
        assert "{reason}" in str(error) and "Call the model again" in str(error), error
    else:
        raise AssertionError("it went on")
# What the function has itself is enough.
got, _ = run(step, x, torch.ones(256, 512, device="cuda"), 2)
assert got.cpu().isfinite().all()
"""
    programs.counts_of(program, tmp_path)


def test_buffer_that_is_written_in_place_stays_with_the_worker(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import torch

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, x, cache, row):
        cache.index_copy_(0, row, self.layer(x))
        return cache.sum(0, keepdim=True).tanh()

torch.manual_seed(0)
step = Step().eval()
x, rows = torch.randn(1, 256), [torch.tensor([row]) for row in range(30)]
cache, there = torch.zeros(1024, 256), torch.zeros(1024, 256, device="cuda")
with torch.no_grad():
    expected = x
    for row in rows:
        expected = step(expected, cache, row)
    step, got = step.cuda(), x.cuda()
    for number, row in enumerate(rows):
        got = step(got, there, row.cuda())
        if number == 15:
            there[500] = 0.0  # writes as rarely as reads bring it back, and both are right
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(there.cpu(), cache)
"""
    counts = programs.counts_of(program, tmp_path)
    cache_bytes = 1024 * 256 * 4
    assert counts["bytes_out"] < 4 * cache_bytes
    assert counts["bytes_in"] < 4 * cache_bytes


def test_text_is_the_same_when_the_worker_dies_while_it_is_written(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
{KILL_WORKERS}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512)).eval()
ids = torch.randint(0, 512, (2, 70))

class Killer(LogitsProcessor):
    def __init__(self, when):
        self.step, self.when = 0, when

    def __call__(self, ids, scores):
        self.step += 1
        if self.step in self.when:
            assert kill_workers() >= 1
        return scores

def write(ids, when=(), **how):
    return model.generate(
        ids, max_new_tokens=24, pad_token_id=0, eos_token_id=None,
        logits_processor=LogitsProcessorList([Killer(when)]), **how).tolist()

greedy, beams = write(ids, do_sample=False), write(ids, do_sample=False, num_beams=2)
model, ids = model.cuda(), ids.cuda()
assert write(ids, do_sample=False) == greedy
assert write(ids, (3, 15, 16), do_sample=False) == greedy
assert write(ids, (7,), do_sample=False, num_beams=2) == beams
"""
    programs.counts_of(program, tmp_path)


def test_example_goes_on_with_its_text_when_the_worker_dies(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "functions")!r})
{KILL_WORKERS}
from generate import handler

def write(when=()):
    written = []
    for number, token in enumerate(handler.tokens(list(b"hello"), 24, 0.8, 1)):
        written.append(token)
        if number in when:
            assert kill_workers() >= 1
    return written

first = write()
assert all(write() == first for _ in range(4))  # by now, its cache stays with the worker
for when in ((0,), (3,), (10, 20), (4, 5, 6)):
    assert write(when) == first
"""
    programs.counts_of(program, tmp_path)


def test_call_that_writes_to_its_inputs_does_so_once_when_its_worker_is_lost_at_their_fetch(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
import torch
from torch_shim.errors import ConnectionLost
from torch_shim.wire.data_channel import DataChannel

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)

    def forward(self, x, count, cache):
        count.add_(1.0)
        cache.add_(self.layer(x))
        return cache.sum()

fetch, cuts = DataChannel.fetch, []

def cut_once(channel, *asked):
    DataChannel.fetch = fetch
    cuts.append(asked)
    raise ConnectionLost("the worker was killed")

torch.manual_seed(0)
step = Step().eval()
x = torch.randn(1, 512)
expected = torch.zeros(256, 512)
with torch.no_grad():
    for _ in range(6):
        step(x, torch.zeros(4), expected)
    step = step.cuda()
    count, cache = torch.zeros(4).cuda(), torch.zeros(256, 512).cuda()
    row = cache[3]  # whoever has a view needs the bytes after each call
    for number in range(6):
        if number >= 3:
            DataChannel.fetch = cut_once
        step(x.cuda(), count, cache)
        assert count[0].item() == number + 1, "the smaller input was changed twice"
assert len(cuts) == 3, cuts
assert torch.equal(cache.cpu(), expected) and torch.equal(row.cpu(), expected[3])
"""
    programs.counts_of(program, tmp_path)
