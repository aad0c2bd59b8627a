"""Calls helpers in forward whose answers change from call to call: HELPER."""

import collections
import datetime
import io
import itertools
import queue
import sys
import tempfile
import threading
import time
import uuid
import warnings
import weakref
from pathlib import Path

import torch
from torch import nn

path, helper = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
results = {}


class Net(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.layer, self.rule = nn.Linear(4, 4), rule

    def forward(self, x):
        return self.rule(self.layer(x))


def run(rule, calls=5):
    torch.manual_seed(1)
    model = Net(rule).to(device).eval()
    with torch.no_grad():
        for _ in range(calls):
            found = model(torch.ones(2, 4, device=device))
            results[f"found{len(results)}"] = found.detach().cpu().clone()


def iterators():
    numbers, colours = itertools.count(1), itertools.cycle([1.0, 2.0, 3.0])
    run(lambda h: h * next(numbers))
    run(lambda h: h * next(colours))
    generator = (value * value for value in range(100))
    run(lambda h: h + next(generator))
    rows = iter([torch.full((4,), float(i)).to(device) for i in range(9)])
    run(lambda h: h + next(rows))
    results["left"] = [next(numbers), next(generator)]


def clocks():
    seen = []

    def rule(h):
        now = (
            time.time_ns(),
            time.perf_counter(),
            time.monotonic(),
            datetime.datetime.now(datetime.UTC),
        )
        seen.append(now)
        return h + (1.0 if all(part for part in now) else 0.0)

    run(rule)
    assert len(set(seen)) == 5, "each call reads the clock"
    results["increasing"] = seen == sorted(seen)


def identities():
    seen = []

    def rule(h):
        seen.append((uuid.uuid4(), threading.get_ident()))
        return h * 2

    run(rule)
    assert len({name for name, _ in seen}) == 5, "each call has a name of its own"


def files():
    lines = io.StringIO("1\n2\n3\n4\n5\n6\n")
    run(lambda h: h * float(lines.readline()))
    with tempfile.NamedTemporaryFile("w+") as file:

        def rule(h):
            file.write("x")
            file.flush()
            return h + len(Path(file.name).read_text("utf-8"))

        run(rule)


def queues():
    waiting = queue.Queue()
    for number in range(9):
        waiting.put(number)
    run(lambda h: h * waiting.get())
    stack = list(range(9))
    run(lambda h: h * stack.pop())
    recent = collections.deque(maxlen=3)

    def rule(h):
        recent.append(h.mean())
        return h + sum(recent) / len(recent)

    run(rule)


def counters():
    counts = collections.Counter()
    table = collections.defaultdict(list)

    def rule(h):
        counts["calls"] += 1
        counts.update(["a", "b"] if counts["calls"] % 2 else ["a"])
        table[counts["b"]].append(counts["calls"])
        return h * counts["a"] + len(table[counts["b"]])

    run(rule)
    results["counts"] = dict(counts)
    results["table"] = {str(key): value for key, value in table.items()}


def callables():
    class Growing:
        def __init__(self):
            self.value = 0

        def __call__(self, h):
            self.value += 1
            return h * self.value

        @property
        def next(self):
            self.value += 10
            return self.value

        def __getattr__(self, name):
            return len(name)

    growing = Growing()
    run(growing)
    run(lambda h: h + growing.next)
    run(lambda h: h + growing.absent)
    results["value"] = growing.value


def locked():
    lock, total = threading.Lock(), [0]
    local = threading.local()

    def rule(h):
        with lock:
            total[0] += 1
        local.count = getattr(local, "count", 0) + 1
        return h * total[0] + local.count

    run(rule)
    results["total"] = total


def weakly_kept():
    class Holder:
        value = 2.0

    holder = Holder()
    reference = weakref.ref(holder)
    run(lambda h: h * (reference().value if reference() else -1.0), 3)
    holder.value = 5.0
    run(lambda h: h * (reference().value if reference() else -1.0), 2)


def raised():
    tries = itertools.count()

    def rule(h):
        if next(tries) % 3 == 2:
            raise ValueError("every third")
        return h + 1

    model = Net(rule).to(device).eval()
    for call in range(7):
        try:
            with torch.no_grad():
                results[f"found{call}"] = model(torch.ones(2, 4, device=device)).cpu()
        except ValueError as error:
            results[f"found{call}"] = str(error)


globals()[helper]()
torch.save(results, path)
