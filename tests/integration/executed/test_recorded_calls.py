"""Whole programs under `gpufaas exec`: when the recording of a call answers, and when not."""

from pathlib import Path

from tests.kit.programs.executed_programs import KILL_WORKERS, ForkedPrograms, execute
from tests.kit.programs.recorded_programs import RECORDED, run_recorded


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    done, counts = execute(RECORDED + program, tmp_path, "--gpu-memory", "160MiB")
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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)


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
    run_recorded(programs, tmp_path, program)
