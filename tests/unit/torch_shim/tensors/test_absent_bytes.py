"""Handles whose bytes only a worker has: whoever reads them gets them, and views need none."""

import pytest

from tests.kit.programs.snippets import Snippet, failures_of

# A worker that has the numbers 0 to 65,535, and counts how often it was asked for them.
WORKER = """
import contextlib, copy, ctypes, io, os, pickle, signal, threading, warnings
from torch_shim.errors import RemoteFailure
from torch_shim.tensors import absent_bytes, write_epochs
from torch_shim.tensors.handles import become_cuda
from torch_shim.wire.shared_memory import tensor_over
from torch_shim.wire.protocol import FailureKind
from torch_shim.wire.manager_session import Fetched

there = torch.arange(65536, dtype=torch.float32)
square = there.view(256, 256)

class Worker:
    def __init__(self, by_file=False, lost=False):
        self.sole, self.fetched, self.dropped = set(), 0, []
        self.by_file, self.lost = by_file, lost

    @contextlib.contextmanager
    def channel_for(self, channel):
        yield channel

    def fetch(self, key, channel):
        self.fetched += 1
        if self.lost:
            raise RemoteFailure(FailureKind.LOST, "the worker has ended", {})
        data = there.numpy().tobytes()
        if not self.by_file:
            return Fetched(None, memoryview(data))
        descriptor = os.memfd_create("bytes")
        os.write(descriptor, data)
        return Fetched(descriptor, memoryview(b""))

    def drop(self, key):
        self.dropped.append(key)

def absent(worker, run_there=lambda *_: None):
    mark = write_epochs.WriteMark()
    storage = absent_bytes.storage_without_bytes(mark, 4 * 65536)
    mark.absent.leave(worker, run_there)
    return become_cuda(tensor_over(storage, torch.float32, 0, (256, 256), (256, 1)))
"""

# Each reads what only the worker has; `square` is the same on the CPU.
READERS = {
    "operator": "assert torch.equal((x + 1).cpu(), square + 1)",
    "method": "assert float(x.sum()) == float(square.sum())",
    "second argument": "assert torch.equal((torch.ones_like(x) + x).cpu(), square + 1)",
    "list": "assert torch.equal(torch.cat([square[:1].cuda(), x])[1:].cpu(), square)",
    "keyword": "assert torch.add(input=x, other=x).sum() == 2 * square.sum()",
    "out": "torch.add(x, 1, out=x); assert x.view(-1)[5] == 6",
    "view of it": "assert x[3:, 5].sum() == square[3:, 5].sum()",
    "item": "assert x[255, 255].item() == 65535",
    "truth": "assert bool(x[0, 1])",
    "list of numbers": "assert x[0, :3].tolist() == [0, 1, 2]",
    "cpu": "assert torch.equal(x.cpu(), square)",
    "to": "assert torch.equal(x.to('cpu', torch.float64), square.double())",
    "numpy": "assert x.detach().cpu().numpy()[0, 9] == 9",
    "forced numpy": "assert x.numpy(force=True)[0, 9] == 9",
    "printing": "assert '6.5535e+04' in repr(x)",
    "formatting": "assert f'{x[0, 2]}' == '2.0'",
    "pickling": "assert torch.equal(pickle.loads(pickle.dumps(x)).cpu(), square)",
    "saving": """
f = io.BytesIO()
torch.save(x, f)
f.seek(0)
assert torch.equal(torch.load(f).cpu(), square)
""",
    "deep copy": "assert torch.equal(copy.deepcopy(x).cpu(), square)",
    "copy": "assert torch.equal(copy.copy(x).cpu(), square)",
    "storage": "assert x.untyped_storage().tolist()[4:8] == [0, 0, 128, 63]",
    "address": "assert ctypes.c_float.from_address(x.data_ptr() + 4).value == 1.0",
    "tensor of it": """
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that clone() is better
    assert torch.equal(torch.tensor(x).cpu(), square)
""",
    "parameter of it": "assert torch.nn.Parameter(x).sum() == square.sum()",
    "assigned data": "y = torch.zeros(1).cuda(); y.data = x; assert y.sum() == square.sum()",
    "writing in place": "x.add_(1); assert x[0, 0] == 1 and x[255, 255] == 65536",
    "writing an element": "x[0, 0] = 7; assert x.sum() == square.sum() + 7",
    "copying into it": "x[:1].copy_(square[1:2]); assert x[1:].sum() == square[1:].sum()",
    "copying from it": "y = square.cuda() * 0; y.copy_(x); assert y.sum() == square.sum()",
    "index with it": """
assert torch.arange(9).cuda()[x[0, :4].long()].tolist() == [0, 1, 2, 3]
""",
    "module": "assert torch.nn.ReLU()(x).sum() == square.sum()",
    "state dict": """
m = torch.nn.Linear(256, 256, bias=False).cuda()
m.load_state_dict({"weight": x})
assert m.weight.sum() == square.sum()
""",
    "vmap": "assert torch.equal(torch.vmap(lambda row: row.sum())(x).cpu(), square.sum(1))",
    "gradient": """
w = torch.ones(256).cuda().requires_grad_()
(x @ w).sum().backward()
assert torch.equal(w.grad.cpu(), square.sum(0))
""",
    "iteration": "assert [float(row[1]) for row in x] == square[:, 1].tolist()",
    "comparison": "assert torch.allclose(x, square.cuda())",
    "einsum": "assert torch.einsum('ij->', x) == square.sum()",
    "operator by its overload": "assert torch.ops.aten.sum.default(x) == square.sum()",
    "thread": """
threads = [threading.Thread(target=lambda: sums.append(float(x.sum()))) for _ in range(4)]
sums = []
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sums == [float(square.sum())] * 4
""",
    "forked child": """
child = os.fork()
if child == 0:
    os._exit(float(x[0, 9]) != 9)
assert os.waitpid(child, 0)[1] == 0
""",
}


@pytest.mark.parametrize("by_file", [False, True])
def test_readers_get_the_bytes_when_only_a_worker_has_them(shim: Snippet, *, by_file: bool) -> None:
    programs = {
        reader: f"""{WORKER}
worker = Worker(by_file={by_file})
x = absent(worker)
assert absent_bytes.waiting
{read}
assert worker.fetched == 1 and not absent_bytes.waiting, (worker.fetched, absent_bytes.waiting)
"""
        for reader, read in READERS.items()
    }
    failures = failures_of(shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_views_and_facts_need_no_bytes(shim: Snippet) -> None:
    shim(f"""{WORKER}
worker = Worker()
x = absent(worker)
assert x.shape == (256, 256) and x.dtype is torch.float32 and x.device.type == "cuda"
assert x.numel() == 65536 and x.is_contiguous() and x.stride() == (256, 1) and len(x) == 256
views = [x[1:], x[..., None], x[0], x.t(), x.view(-1), x.transpose(0, 1), x.detach(), x.data]
views += [*x.chunk(2), *x.split(100), x.expand(2, 256, 256), x.narrow(0, 1, 2), x.unsqueeze(0)]
views += [x.as_strided((2,), (1,)), x.permute(1, 0), x.select(0, 1), x.squeeze(), x.mT, x.T]
assert all(v.is_cuda and absent_bytes.absent_of(v) for v in views)
assert not worker.fetched and x.grad_fn is None and not x.requires_grad
del x, views
""")


def test_worker_hears_of_it_when_nobody_needs_the_bytes_any_more(shim: Snippet) -> None:
    shim(f"""{WORKER}
worker = Worker()
x = absent(worker)
(key,) = absent_bytes.waiting
view = x[1:]
del x
assert not worker.dropped
del view
assert worker.dropped == [key] and not absent_bytes.waiting and not worker.fetched
y = absent(worker)
looked_at = write_epochs.mark_of(y).key
assert torch.equal(y.cpu(), square)
assert worker.dropped == [key]
del y
assert worker.dropped == [key, looked_at]
""")


def test_the_last_workers_that_have_a_copy_hear_of_it_when_nobody_needs_it_any_more(
    shim: Snippet,
) -> None:
    shim(
        WORKER
        + """
sent = torch.ones(4096).cuda()
mark = write_epochs.marked(sent)
others = [Worker() for _ in range(9)]
for other in (*others, others[-1]):
    mark.held_by(other)
key = mark.key
del mark, sent
assert [other.dropped for other in others[-4:]] == 4 * [[key]]
assert not any(other.dropped for other in others[:-4])
"""
    )


def test_error_says_so_when_the_bytes_are_lost(shim: Snippet) -> None:
    shim(f"""{WORKER}
x = absent(Worker(lost=True))
for _ in range(2):
    try:
        x.sum()
    except RuntimeError as error:
        assert "CUDA error: worker lost: the worker has ended" in str(error), error
    else:
        raise AssertionError("it computed")
""")


def test_process_ends_and_reads_no_garbage_when_a_reader_is_overlooked(shim: Snippet) -> None:
    shim(f"""{WORKER}
x = absent(Worker())
with torch._C.DisableTorchFunctionSubclass():
    address = x.data_ptr()
libc = ctypes.CDLL(None)
child = libc.fork()  # unlike os.fork, which has the bytes fetched first
if child == 0:
    libc.prctl(4, 0)  # no core file
    ctypes.string_at(address, 4)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
assert float(x.sum()) == float(there.sum())
""")


def test_operator_runs_where_the_bytes_are_when_that_is_offered(shim: Snippet) -> None:
    shim(f"""{WORKER}
asked = []
def run_there(func, args, kwargs):
    asked.append(func.__name__)
    return absent(worker) if func.__name__ == "index_select" else None
worker = Worker()
x = absent(worker, run_there)
rows = torch.tensor([1, 0]).cuda()
y = x.index_select(0, rows)
assert absent_bytes.absent_of(x) and absent_bytes.absent_of(y) and not worker.fetched
assert (x * 2).sum() == 2 * there.sum()
assert asked[:2] == ["index_select", "mul"] and worker.fetched == 1
""")


def test_storage_becomes_absent_again_when_the_worker_writes_to_it(shim: Snippet) -> None:
    shim(f"""{WORKER}
worker = Worker()
x = absent(worker)
view = x[0]
assert view.sum() == there[:256].sum()
write_epochs.mark_of(x).absent.leave(worker, lambda *_: None)
there += 1
assert absent_bytes.absent_of(view)
assert x.sum() == there.sum() and view.sum() == there[:256].sum() and worker.fetched == 2
""")


def test_addresses_are_used_again_unless_bytes_came_to_them(shim: Snippet) -> None:
    shim(f"""
{WORKER}
worker = Worker()
first = absent(worker)
address = first.data_ptr()
view = first[3:]
del first
second = absent(worker)
assert second.data_ptr() != address, "a view lies there still"
del view
third = absent(worker)
assert third.data_ptr() == address and third.untyped_storage().nbytes() == 4 * 65536
assert float(third.sum()) == float(square.sum())  # they come
filled = write_epochs.marked(third).absent._memory  # else the address might be free for anybody
del third
assert absent(worker).data_ptr() != filled.address
left = absent(worker)
address = left.data_ptr()
assert float(left.sum()) == float(square.sum())
lacking = write_epochs.marked(left).absent
lacking._memory.lent = "the pages that came"
lacking.leave(worker)
assert lacking.lent is None
del left, lacking
again = absent(worker)
assert again.data_ptr() == address and float(again.sum()) == float(square.sum())
""")
