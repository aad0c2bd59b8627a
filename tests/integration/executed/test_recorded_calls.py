"""Whole programs under `gpufaas exec`: when the recording of a call answers, and when not."""

from pathlib import Path

from tests.kit.programs.executed_programs import KILL_WORKERS, ForkedPrograms, execute

# `again(model, x)` is an answer, and whether a recording gave it.
SETUP = """
import threading
import torch
from torch_shim.process_report import report

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
x = torch.randn(3, 4)

def native(x, model=model):
    return torch.nn.functional.linear(
        torch.relu(torch.nn.functional.linear(x, model[0].weight.cpu(), model[0].bias.cpu())),
        model[2].weight.cpu(), model[2].bias.cpu(),
    )

def again(model, *inputs):
    before = report.counts.recorded_calls
    with torch.no_grad():
        answer = model(*(each.cuda() for each in inputs))
    return answer.cpu(), report.counts.recorded_calls > before

def recorded(model, *inputs):
    for _ in range(6):
        answer, is_recorded = again(model, *inputs)
    assert is_recorded, report.counts
    return answer

with torch.no_grad():
    expected = model(x)
model = model.cuda()
"""


def run(programs: ForkedPrograms, folder: Path, program: str) -> None:
    done, counts = programs.execute(SETUP + program + '\nprint("well")\n', folder)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert counts["recorded_calls"], counts


def test_recorded_call_answers_as_the_model_does_whatever_its_input_holds(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
assert torch.equal(recorded(model, x), expected)
for seed in range(20):
    given = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    answer, is_recorded = again(model, given)
    with torch.no_grad():
        assert is_recorded and torch.equal(answer, native(given))
    del answer
first, second = again(model, x)[0], again(model, x + 1)[0]
assert torch.equal(first, expected) and not torch.equal(second, expected)  # each its own memory
"""
    run(programs, tmp_path, program)


def test_recording_does_not_answer_after_a_weight_was_written_by_another_thread(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)

def write():
    with torch.no_grad():
        model[0].weight.mul_(2)

thread = threading.Thread(target=write)
thread.start()
thread.join()
answer, is_recorded = again(model, x)
with torch.no_grad():
    assert not is_recorded and torch.allclose(answer, native(x))
    assert not torch.equal(answer, expected)
assert torch.equal(recorded(model, x), answer)
# From now on the weight is sent with each call, be that recorded or not.
model[0].weight.data.div_(2)  # no version of autograd's says so
assert torch.allclose(again(model, x)[0], expected)
model[0].weight = torch.nn.Parameter(torch.zeros(8, 4).cuda())
with torch.no_grad():
    assert torch.allclose(again(model, x)[0], native(x))
"""
    run(programs, tmp_path, program)


def test_recording_does_not_answer_after_a_hook_was_added(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)
handle = model[2].register_forward_hook(lambda module, given, answer: answer + 1)
answer, _ = again(model, x)
assert torch.allclose(answer, expected + 1)
handle.remove()
assert torch.allclose(again(model, x)[0], expected)
seen = []
model.register_forward_pre_hook(lambda module, given: seen.append(1))
for _ in range(4):
    again(model, x)
assert len(seen) == 4
"""
    run(programs, tmp_path, program)


def test_recording_does_not_answer_under_another_setting(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)
with torch.autocast("cuda", torch.bfloat16):
    answer, is_recorded = again(model, x)
    assert not is_recorded and answer.dtype is torch.bfloat16
answer, is_recorded = again(model, x)
assert is_recorded and answer.dtype is torch.float32
settings = [
    (torch.set_float32_matmul_precision, "medium", "highest"),
    (torch.use_deterministic_algorithms, True, False),
    (lambda value: setattr(torch.backends.cudnn, "benchmark", value), True, False),
    (torch.set_default_dtype, torch.float64, torch.float32),
]
for change, other, usual in settings:
    change(other)
    assert not again(model, x)[1], other
    change(usual)
    assert torch.equal(recorded(model, x), expected)
torch.backends.cuda.matmul.fp32_precision = "tf32"  # the other interface: no worker computes so
try:
    torch.get_float32_matmul_precision()
except RuntimeError:
    pass
else:
    raise AssertionError("the two interfaces can be told apart no more")
answer, is_recorded = again(model, x)
assert not is_recorded and torch.equal(answer, expected) and report.counts.local_calls
torch.backends.cuda.matmul.fp32_precision = "ieee"
model.double()
answer, is_recorded = again(model, x.double())
assert not is_recorded and answer.dtype is torch.float64
"""
    run(programs, tmp_path, program)


def test_recording_does_not_answer_for_inputs_of_another_layout(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)
turned, repeated = x.t().contiguous().t(), x[:1].expand(3, 4)
for other in (x[:2], x[:, None], turned, repeated, torch.zeros(0, 4), torch.zeros(3000, 4)):
    answer, is_recorded = again(model, other)
    with torch.no_grad():
        assert not is_recorded and torch.allclose(answer, native(other)), other.shape
assert torch.equal(recorded(model, x), expected)
class Scaled(torch.nn.Module):
    def forward(self, x, factor):
        return x * factor


scaled = Scaled().cuda()
anchor = torch.nn.Linear(2, 2).cuda()
scaled.anchor = anchor
with torch.no_grad():
    for factor in (2, 2, 2, 2, 2, 3, True, 2, 2.0, 2.5, -0.0, 0.0):
        answer = scaled(x.cuda(), factor).cpu()
        assert torch.equal(answer, x * factor), factor
"""
    run(programs, tmp_path, program)


def test_call_is_answered_rightly_when_its_worker_is_killed_between_and_in_recorded_calls(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{KILL_WORKERS}
recorded(model, x)
assert kill_workers() >= 1
answer, is_recorded = again(model, x)
assert not is_recorded and torch.equal(answer, expected)
assert report.counts.repeated_calls == 1
recorded(model, x)

from torch_shim.wire.data_channel import DataChannel

run_again = DataChannel.run_again

def killed_in_it(self, packed, usual):
    DataChannel.run_again = run_again
    self.wire.send_packed(packed)
    assert kill_workers() >= 1
    self.wire.send_packed = lambda frame: None
    run_again(self, packed, usual)

DataChannel.run_again = killed_in_it
answer, is_recorded = again(model, x)
assert torch.equal(answer, expected)
assert torch.equal(recorded(model, x), expected)
"""
    run(programs, tmp_path, program)


def test_recording_does_not_answer_for_a_model_that_was_evicted_and_loaded_again(
    tmp_path: Path,
) -> None:
    program = """
other = torch.nn.Linear(4096, 5632).cuda()
one = torch.ones(1, 4096)
model.register_buffer("ballast", torch.zeros(22 << 20).cuda())  # 88 MiB each: both do not fit
for _ in range(3):
    assert torch.equal(recorded(model, x), expected)
    answer, is_recorded = again(other, one)
    assert not is_recorded, "it was evicted, and its worker's channel has ended"
print("well")
"""
    done, counts = execute(SETUP + program, tmp_path, "--gpu-memory", "160MiB")
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
    assert counts["loads"] == 6, dict(counts)


def test_recording_does_not_answer_under_a_lease_that_was_recalled(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
other = torch.nn.Linear(4, 4).cuda()  # the one GPU's lease goes from model to model
recorded(model, x)
acquires = report.counts.acquires
for seed in range(5):
    again(other, x)
    given = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(again(model, given)[0], native(given))
assert report.counts.acquires >= acquires + 10, "each was recalled for the other"
assert not report.counts.local_calls
"""
    run(programs, tmp_path, program)


def test_call_whose_output_has_another_shape_each_time_is_answered_rightly(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)
torch._dynamo.config.capture_dynamic_output_shape_ops = True

class Places(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return (self.layer(x) * 0 + x).nonzero()

places = Places().cuda()
for count in (1, 1, 1, 1, 2, 0, 1, 3, 1, 1):
    given = torch.zeros(3, 4)
    given[:count] = 1
    answer, _ = again(places, given)
    assert torch.equal(answer, given.nonzero()), count
"""
    run(programs, tmp_path, program)


def test_large_input_is_recorded_while_its_content_is_new_and_kept_when_it_comes_again(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
wide = torch.nn.Linear(5000, 2)
with torch.no_grad():
    right = lambda given: torch.nn.functional.linear(given, wide.weight.cpu(), wide.bias.cpu())
    wide.cuda()
    for seed in range(8):
        given = torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed))
        answer, is_recorded = again(wide, given)
        assert torch.allclose(answer, right(given), atol=1e-5)
    assert is_recorded
    there = given.cuda()
    sent = []
    for _ in range(6):
        before = report.counts.bytes_in
        assert torch.allclose(wide(there).cpu(), right(given), atol=1e-5)
        sent.append(report.counts.bytes_in - before)
    assert sent[-1] < 100 < sent[0], sent
    for factor in (2, 3, 4, 5):
        there.mul_(factor)  # its storage is the same, and its content new
        given = given * factor
        assert torch.allclose(wide(there).cpu(), right(given), rtol=1e-4), factor
    part = torch.randn(9, 5000).cuda()
    for row in (0, 3, 7, 3):
        rows = part[row : row + 2]
        assert torch.allclose(wide(rows).cpu(), right(rows.cpu()), rtol=1e-4, atol=1e-4)
"""
    run(programs, tmp_path, program)


def test_recording_of_inputs_that_overlap_does_not_answer_for_inputs_that_do_not(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)

class Weighed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, first, second):
        return self.layer(first) * 0 + first * 10 + second

weighed, row = Weighed().cuda(), torch.arange(4.0).cuda()
with torch.no_grad():
    for _ in range(6):
        assert weighed(row[:3], row[1:]).tolist() == [1, 12, 23]
    first, second = torch.tensor([1.0, 2, 3]).cuda(), torch.tensor([7.0, 8, 9]).cuda()
    for _ in range(6):
        assert weighed(first, second).tolist() == [17, 28, 39]
    assert weighed(row[:3], row[1:]).tolist() == [1, 12, 23]
assert report.counts.unrecorded_calls["inputs share memory"] == 6, report.counts
"""
    run(programs, tmp_path, program)


def test_every_thread_has_recordings_of_its_own_channel(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor

def ask(number):
    given = torch.full((3, 4), float(number))
    answer, _ = again(model, given)
    with torch.no_grad():
        return torch.equal(answer, native(given))

recorded(model, x)
with ThreadPoolExecutor(6) as pool:
    assert all(pool.map(ask, range(200)))
"""
    run(programs, tmp_path, program)


def test_what_cannot_be_recorded_is_counted_by_its_reason(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)

class Sized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.layer(x) * scale

sized = Sized().cuda()
with torch.no_grad():
    for _ in range(5):
        sized(x.cuda(), torch.ones(3, 8).cuda()[:, ::2])
large = torch.nn.Linear(2000, 2).cuda()
with torch.no_grad():
    for count in range(1, 60):  # a new shape each time
        large(torch.ones(1, count, 2000).cuda())
reasons = report.counts.unrecorded_calls
assert reasons["an input has gaps, or a class of its own"] == 5, reasons
assert reasons["its calls are of another kind each time"] > 20, reasons
there = torch.ones(1, 2000).cuda()
for _ in range(5):
    large(there)
assert reasons["an input is kept from then on, or lies in a block"] >= 1, reasons
"""
    run(programs, tmp_path, program)


# Modules with a state; `asked(...)` is an answer, and whether a recording gave it.
STATES = """
class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * 0 + torch.rand_like(x)

class Counting(Noisy):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += x.sum()
        return self.layer(x) * 0 + self.count

class Cached(Noisy):  # a cache of 64 KiB and more stays with the worker
    def forward(self, x, at, cache):
        cache.index_add_(0, at, x)
        return self.layer(x) * 0 + cache[:4].sum(0)

def asked(module, *inputs):
    before = report.counts.recorded_calls
    with torch.no_grad():
        answer = module(*inputs)
    return answer.cpu(), report.counts.recorded_calls > before

recorded(model, x)
one, at = torch.ones(1, 4).cuda(), torch.tensor([1]).cuda()
"""


def test_recorded_calls_draw_the_numbers_that_a_cpu_program_draws(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
noisy = Noisy().cuda()
torch.manual_seed(3)
native = torch.Generator().manual_seed(3)
answers = []
for turn in range(12):
    answer, is_recorded = asked(noisy, one)
    assert torch.equal(answer, torch.rand(1, 4, generator=native)), turn
    answers.append(is_recorded)
    if turn % 4 == 2:  # numbers that are drawn here come in between
        assert torch.equal(torch.rand(3), torch.rand(3, generator=native))
assert answers[-6:] == [True] * 6, answers
torch.manual_seed(9)
first, _ = asked(noisy, one)
torch.manual_seed(9)
assert torch.equal(asked(noisy, one)[0], first)
"""
    run(programs, tmp_path, STATES + program)


def test_recorded_calls_of_many_threads_draw_no_number_twice(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor

noisy = Noisy().cuda()
before = report.counts.recorded_calls
with ThreadPoolExecutor(4) as pool:
    answers = list(pool.map(lambda _: asked(noisy, one)[0].flatten().tolist(), range(80)))
assert len({number for answer in answers for number in answer}) == 320
assert report.counts.recorded_calls > before
"""
    run(programs, tmp_path, STATES + program)


def test_input_that_overlaps_itself_is_not_recorded(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
class Doubles(Noisy):
    def forward(self, x):
        return x * 2 + self.layer.bias.sum() * 0

class Draws(Noisy):
    def forward(self, x):
        return x * 2 + torch.rand_like(x) * 0 + self.layer.bias.sum() * 0

row = torch.arange(9.0)
for module in (Doubles().cuda(), Draws().cuda()):
    for shape, strides in (((3, 3), (0, 4)), ((2, 2, 2), (1, 1, 5))):  # as long as it has elements
        for _ in range(5):
            answer, is_recorded = asked(module, row.cuda().as_strided(shape, strides))
            assert torch.equal(answer, row.as_strided(shape, strides) * 2) and not is_recorded
assert report.counts.unrecorded_calls["an input has gaps, or a class of its own"] == 20
sizes = Sizes().cuda()
for _ in range(5):  # an empty input lies where the next one does
    _, is_recorded = asked(sizes, torch.zeros(0, 4).cuda(), one)
assert is_recorded
"""
    sizes = """
class Sizes(Noisy):
    def forward(self, none, x):
        return self.layer(x) + none.sum()
"""
    run(programs, tmp_path, STATES + sizes + program)


def test_input_whose_bytes_have_been_elsewhere_takes_no_number(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
class Reads(Cached):
    def forward(self, x, at, cache, writes):
        return super().forward(x, at, cache) if writes else self.layer(x) * 0 + cache[:4].sum(0)

reads, cache = Reads().cuda(), torch.zeros(5000, 4).cuda()
expected = 0.0
for turn in range(1, 6):
    asked(reads, one, at, cache, True)  # it stays with the worker
    cache.add_(1)  # it is fetched, and is another one here
    expected += 5
    answer, is_recorded = asked(reads, one, at, cache, False)
    assert answer.tolist() == [[expected] * 4] and not is_recorded
reasons = report.counts.unrecorded_calls
assert reasons["the bytes of an input have been elsewhere"] >= 4, (reasons, report.counts)
"""
    run(programs, tmp_path, STATES + program)


def test_recorded_calls_write_to_buffers_and_see_what_others_write(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
counting = Counting().cuda()
expected = 0.0
for turn in range(16):
    answer, is_recorded = asked(counting, one * turn)
    expected += 4 * turn
    assert answer.tolist() == [[expected] * 4] and counting.count.item() == expected, turn
    if turn == 8:
        with torch.no_grad():
            counting.count.mul_(2)
        expected *= 2
    if turn == 10:  # seen by no counter of autograd's
        counting.count.data.fill_(5)
        expected = 5.0
assert is_recorded, report.counts
"""
    run(programs, tmp_path, STATES + program)


def test_recorded_calls_write_to_a_cache_that_stays_with_the_worker(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
cached = Cached().cuda()
caches = [torch.zeros(5000, 4).cuda() for _ in range(2)]
rows = [0.0, 0.0]
kinds = []
for turn in range(24):
    number = turn // 2 % 2  # one recording serves both
    answer, is_recorded = asked(cached, one * turn, at, caches[number])
    rows[number] += turn
    kinds.append(is_recorded)
    assert answer.tolist() == [[rows[number]] * 4], turn
    if turn == 12:
        def write():
            caches[0].add_(1)
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        rows[0] += 4  # of the four rows that are summed up
    if turn == 17:
        assert caches[0][1, 0].item() == rows[0] - 3  # it is fetched
assert sum(kinds) >= 10 and all(kinds[-2:]), kinds
assert caches[1].cpu()[1].tolist() == [rows[1]] * 4
before = report.counts.recorded_calls
asked(cached, one, at, torch.zeros(4000, 4).cuda())
assert report.counts.recorded_calls == before, "it is another shape"
"""
    run(programs, tmp_path, STATES + program)


def test_inputs_that_share_memory_and_are_written_to_are_not_recorded_ones(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
class Moves(Noisy):
    def forward(self, first, second):
        first += 1
        return self.layer(second) * 0 + first + second

moves = Moves().cuda()
def both():
    row = torch.zeros(2, 1, 4).cuda()
    return row[0], torch.zeros(1, 4).cuda()
for _ in range(6):
    answer, is_recorded = asked(moves, *both())
    assert answer.tolist() == [[1.0] * 4]
assert is_recorded
row = torch.zeros(1, 4).cuda()
for turn in range(1, 6):
    answer, is_recorded = asked(moves, row, row.view(1, 4))
    assert answer.tolist() == [[2.0 * turn] * 4] and not is_recorded, (turn, answer)
"""
    run(programs, tmp_path, STATES + program)


def test_output_of_another_shape_is_right_though_its_call_has_written(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
torch._dynamo.config.capture_dynamic_output_shape_ops = True

class Places(Counting):
    def forward(self, x):
        self.count += 1
        return (self.layer(x) * 0 + x).nonzero()

places = Places().cuda()
for turn, count in enumerate((1, 1, 1, 1, 1, 2, 0, 1, 3, 1, 1), 1):
    given = torch.zeros(3, 4)
    given[:count] = 1
    answer, is_recorded = asked(places, given.cuda())
    assert torch.equal(answer, given.nonzero()), turn
    assert places.count.item() == turn
    assert is_recorded == (turn == 5), turn
assert report.counts.unrecorded_calls["its answer is another one"] == 1
"""
    run(programs, tmp_path, STATES + program)


def test_named_call_whose_worker_is_killed_has_written_once(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{KILL_WORKERS}
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.protocol import FrameKind

counting, noisy = Counting().cuda(), Noisy().cuda()
torch.manual_seed(3)
native = torch.Generator().manual_seed(3)
ask = DataChannel.ask

def killed_in_it(self, kind, *rest, **more):
    if kind is FrameKind.CALL_AGAIN:
        DataChannel.ask = ask
        assert kill_workers() >= 1
    return ask(self, kind, *rest, **more)

for turn in range(1, 16):
    answer, is_recorded = asked(counting, one)
    assert answer.tolist() == [[4.0 * turn] * 4], turn
    answer, _ = asked(noisy, one)
    assert torch.equal(answer, torch.rand(1, 4, generator=native)), turn
    if turn in (6, 12):
        assert is_recorded
        DataChannel.ask = killed_in_it
assert DataChannel.ask is ask and report.counts.repeated_calls >= 2, report.counts
"""
    run(programs, tmp_path, STATES + program)


def test_kept_input_that_the_worker_lacks_is_sent_again(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"""
{KILL_WORKERS}
large = torch.nn.Linear(2000, 2).cuda()
there = torch.randn(1, 2000).cuda()
expected, _ = asked(large, there)
for _ in range(6):
    answer, is_recorded = asked(large, there)
    assert torch.equal(answer, expected)
assert is_recorded
assert kill_workers() >= 1
answer, is_recorded = asked(large, there)
assert torch.equal(answer, expected) and not is_recorded
for _ in range(6):
    answer, is_recorded = asked(large, there)
    assert torch.equal(answer, expected)
assert is_recorded
with torch.no_grad():
    large.bias.add_(1)
answer, is_recorded = asked(large, there)
assert torch.allclose(answer, expected + 1) and not is_recorded
with torch.autocast("cuda", torch.bfloat16):
    answer, _ = asked(large, there)
    assert answer.dtype is torch.bfloat16
"""
    run(programs, tmp_path, STATES + program)


def test_gradients_flow_through_an_answer_that_was_recorded(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = """
recorded(model, x)
before = report.counts.recorded_calls
for _ in range(6):
    answer = model(x.cuda())
assert report.counts.recorded_calls > before
answer.sum().backward()
assert model[0].weight.grad is not None and model[0].weight.grad.abs().sum() > 0
with torch.inference_mode():
    for _ in range(6):
        assert torch.equal(model(x.cuda()).cpu(), expected)
with torch.no_grad():
    answer = model(x.cuda())
    answer += 1  # it is no inference tensor, and nobody else's
    assert torch.allclose(answer.cpu(), expected + 1)
assert torch.equal(again(model, x)[0], expected)
"""
    run(programs, tmp_path, program)


def test_forked_child_makes_its_own_recordings(programs: ForkedPrograms, tmp_path: Path) -> None:
    program = """
import os

recorded(model, x)
child = os.fork()
if not child:
    try:
        answer, is_recorded = again(model, x)
        assert not is_recorded and torch.equal(answer, expected)
        assert torch.equal(recorded(model, x), expected)
    except BaseException:
        os._exit(1)
    os._exit(0)
for _ in range(10):
    assert torch.equal(again(model, x)[0], expected)
assert os.waitpid(child, 0)[1] == 0
"""
    run(programs, tmp_path, program)
