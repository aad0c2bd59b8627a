"""Whole programs under `gpufaas exec`: recorded calls that draw, write, or have kept tensors."""

from pathlib import Path

from tests.kit.places import ROOT
from tests.kit.programs.executed_programs import KILL_WORKERS, ForkedPrograms
from tests.kit.programs.recorded_programs import STATES, run_recorded


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + sizes + program)


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + program)


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
    run_recorded(programs, tmp_path, STATES + program)


def test_modules_drawn_at_random_answer_as_on_the_cpu(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    program = f"import sys; sys.path.append({str(ROOT)!r})\n"
    program += "from hunt.fuzz.calls import main; sys.argv[1:] = {}; main()"
    done, counts = programs.execute(program.format(["--modules", "6"]), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts["recorded_calls"] >= 20
