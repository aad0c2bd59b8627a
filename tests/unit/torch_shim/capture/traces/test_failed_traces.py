"""A call that a module refuses leaves its graphs; code without one is passed over."""

from tests.kit.programs.snippets import Snippet

MODELS = """
import torch
from torch import nn
from torch_shim.process_report import report

class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

class Refusing(Shapes):
    def forward(self, x):
        if x.shape[-1] != 4:
            raise ValueError("four numbers")
        return self.layer(x)

class Key(Shapes):
    def forward(self, x):
        return self.layer({4: x}[x.shape[-1]])

class TwoGraphs(Shapes):
    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()
        return self.layer(x)

class Untraced(Shapes):
    def forward(self, x):
        try:
            with open("/dev/null"):
                torch._dynamo.graph_break()
                return self.layer(x)
        finally:
            self.done = True

def graphs_run(model, size=4):
    before = sum(report.counts.local_calls.values())
    with torch.no_grad():
        model(torch.ones(2, size, device="cuda"))
    return sum(report.counts.local_calls.values()) - before
"""


def test_graphs_answer_after_a_call_that_the_module_refused(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{MODELS}
for kind, graphs in ((Shapes, 1), (Refusing, 1), (Key, 1), (TwoGraphs, 2)):
    for first in (3, 4):
        model = kind().cuda()
        for size in (first, 4, 3, 3, 4):
            try:
                assert (size, graphs_run(model, size)) == (4, graphs), kind
            except (RuntimeError, ValueError, KeyError):
                assert size == 3, kind
""")


def test_graphs_of_a_compiled_function_answer_after_a_call_that_it_refused(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{MODELS}
weight = torch.ones(4, 4, device="cuda")
product = torch.compile(lambda x: x @ weight)
for size in (4, 3, 3, 4):
    try:
        assert (size, graphs_run(product, size)) == (4, 1)
    except RuntimeError:
        assert size == 3
""")


def test_error_of_a_trace_is_raised_when_a_function_has_to_be_one_graph(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{MODELS}
@torch.compile(fullgraph=True)
def one_graph(x):
    torch._dynamo.graph_break()
    return x * 2

class Calling(Shapes):
    def forward(self, x):
        x = self.layer(x)
        torch._dynamo.graph_break()
        return one_graph(x)

for called in (one_graph, Calling().cuda()):
    for _ in range(2):
        try:
            graphs_run(called)
        except torch._dynamo.exc.Unsupported:
            continue
        raise AssertionError("it broke")
""")


def test_code_is_traced_once_when_it_has_no_graph_and_the_call_succeeds(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{MODELS}
model = Untraced().cuda()
times = []
for _ in range(6):
    graphs_run(model)
    times.append(report.counts.trace_s)
assert 0 < times[0] and times[2:] == times[2:3] * 4, (times, report.counts)
""")


def test_graphs_answer_when_there_are_as_many_as_may_be(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{MODELS}
from torch_shim.capture.traces import dynamo_settings
dynamo_settings.RECOMPILE_LIMIT = torch._dynamo.config.recompile_limit = 2

class Worded(Shapes):
    word = "a"

    def forward(self, x):
        return self.layer(x) * len(self.word)

model = Worded().cuda()
for model.word in ("a", "bb", "ccc", "dddd"):
    graphs_run(model)
model.word = "a"
assert graphs_run(model) == 1, report.counts
""")


def test_background_traces_the_next_call_when_the_module_refused_the_first(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{MODELS}
import threading
from torch_shim.capture import module_calls
from torch_shim.capture import root_calls
from torch_shim.capture import root_calls
graphs_run(Key().cuda())  # from now on there is something that traces
module_calls.trace_in_background()
ended = threading.Semaphore(0)
ends = root_calls.CompiledFunctions.end_trace
makes, threads = root_calls.Graph, []

def end_trace(*arguments):
    ends(*arguments)
    ended.release()

def graph(*arguments):
    threads.append(threading.current_thread())
    return makes(*arguments)

root_calls.CompiledFunctions.end_trace, root_calls.Graph = end_trace, graph
for kind in (Shapes, Refusing):
    model = kind().cuda()
    for size in (3, 3, 4):
        try:
            graphs_run(model, size)
        except (RuntimeError, ValueError):
            assert size == 3
        assert ended.acquire(timeout=120)
assert len(threads) == 2 and threading.current_thread() not in threads
""")


def test_refused_call_prints_no_trace_of_torchs_when_its_shapes_are_symbols(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{MODELS}
import logging
printed = []

class Printing(logging.Handler):
    def emit(self, record):
        printed.append(record.getMessage())

model = Shapes().cuda()
for size in (4, 3, 5):
    for name in ("torch._subclasses.fake_tensor", "torch._dynamo"):
        logging.getLogger(name).addHandler(Printing())
    try:
        graphs_run(model, size)
    except RuntimeError:
        assert size != 4
assert not printed, printed
""")
