"""Changes what a forward pass reads beside its module, between two calls: WHAT."""

import collections
import contextvars
import dataclasses
import enum
import functools
import random
import sys
import types
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

path, what = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
warnings.simplefilter("ignore")
results = {}
SCALE = 1.0
TABLE = {"a": 1.0, "list": [1.0, 2.0]}
SHIFT = torch.ones(4).to(device)
CPU_NUMBER = torch.tensor(2.0)
temperature = contextvars.ContextVar("temperature", default=1.0)


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    layers: list = dataclasses.field(default_factory=lambda: [0, 1])
    mode: Mode = Mode.PLAIN


def helper(x):
    return x * 2


class Net(nn.Module):
    level = 1.0

    def __init__(self, rule, **state):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rule = rule
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.rule(self, self.layer(x))


def run(rule, changes, **state):
    torch.manual_seed(1)
    model = Net(rule, **state).to(device).eval()
    with torch.no_grad():
        for number, change in enumerate([None, None, *changes, None]):
            if change is not None:
                change(model)
            found = model(torch.full((2, 4), 1.0 + number % 2).to(device))
            results[f"found{len(results)}"] = found.detach().cpu().clone()


def set_global(name, value):
    return lambda _: globals().__setitem__(name, value)


def module_globals():
    run(lambda _, h: h * SCALE, [set_global("SCALE", 3.0), set_global("SCALE", -1.0)])
    run(lambda _, h: h + SHIFT, [lambda _: SHIFT.mul_(5), set_global("SHIFT", SHIFT + 1)])
    run(lambda _, h: h * CPU_NUMBER, [lambda _: CPU_NUMBER.fill_(7)])
    run(lambda _, h: helper(h), [set_global("helper", lambda x: x - 1)])


def nested_tables():
    run(
        lambda _, h: h * TABLE["a"] + sum(TABLE["list"]),
        [
            lambda _: TABLE.update(a=4.0),
            lambda _: TABLE["list"].append(3.0),
            lambda _: TABLE["list"].__setitem__(0, 9.0),
        ],
    )


def numpy_state():
    run(
        lambda self, h: h * torch.from_numpy(self.scales).to(h) + float(self.scales.sum()),
        [lambda m: m.scales.__setitem__(0, 9.0), lambda m: m.scales.fill(2.0)],
        scales=np.arange(4, dtype=np.float32),
    )
    run(
        lambda self, h: h * self.factor,
        [
            lambda m: setattr(m, "factor", np.float32(3)),
            lambda m: setattr(m, "factor", np.int64(2)),
        ],
        factor=np.float64(1.5),
    )


def numpy_randomness():
    run(lambda _, h: h * np.random.uniform(), [])
    run(lambda _, h: h + torch.from_numpy(np.random.randn(4)).to(h), [])
    run(lambda _, h: F.dropout(h, 0.5, training=np.random.rand() > 0.3), [])
    results["next"] = float(np.random.rand())


def python_randomness():
    run(lambda _, h: h * random.random(), [])
    run(lambda _, h: h[:, random.sample(range(4), 2)], [])
    run(lambda _, h: h + random.choice([1, 2, 3]) + random.gauss(0, 1), [])
    results["next"] = random.random()


def torch_randomness():
    run(lambda _, h: h * torch.rand(1, device=h.device), [lambda _: torch.manual_seed(7)])
    run(lambda _, h: h[:, torch.randperm(4, device=h.device)], [])
    run(lambda _, h: h + torch.randn(4).to(h.device) + torch.rand(()).item(), [])
    run(lambda _, h: torch.bernoulli(h.sigmoid()) + torch.poisson(h.abs()), [])
    results["next"] = torch.rand(1)


def context_variables():
    run(lambda _, h: h / temperature.get(), [lambda _: temperature.set(4.0)])


def configurations():
    run(
        lambda self, h: (
            h * self.config.scale * (2 if self.config.mode is Mode.DOUBLED else 1)
            + len(self.config.layers)
        ),
        [
            lambda m: setattr(m.config, "scale", 3.0),
            lambda m: setattr(m.config, "mode", Mode.DOUBLED),
            lambda m: m.config.layers.append(2),
            lambda m: setattr(m, "config", Config(0.5)),
        ],
        config=Config(),
    )
    run(
        lambda self, h: h * self.space.inner.value,
        [lambda m: setattr(m.space.inner, "value", 4.0)],
        space=types.SimpleNamespace(inner=types.SimpleNamespace(value=2.0)),
    )


def closures():
    factor = 1.0

    def rule(_, h):
        return h * factor

    def change(_):
        nonlocal factor
        factor = 6.0

    run(rule, [change])
    run(
        lambda self, h: self.call(h),
        [
            lambda m: setattr(m, "call", functools.partial(torch.mul, other=5.0)),
            lambda m: setattr(m, "call", lambda h: h - 3),
        ],
        call=functools.partial(torch.mul, other=2.0),
    )


def class_state():
    run(
        lambda self, h: h * self.level,
        [lambda _: setattr(Net, "level", 2.5), lambda m: setattr(m, "level", 8.0)],
    )


def containers():
    run(
        lambda self, h: h + sum(self.recent) + len(self.names),
        [lambda m: m.recent.append(2.0), lambda m: m.names.add("b"), lambda m: m.recent.popleft()],
        recent=collections.deque([1.0], maxlen=2),
        names={"a"},
    )
    run(
        lambda self, h: h * torch.stack(self.weights).sum(0),
        [lambda m: m.weights.append(torch.ones(4).to(device)), lambda m: m.weights[0].mul_(3)],
        weights=[torch.ones(4).to(device)],
    )


def remembered_results():
    def rule(self, h):
        key = tuple(h.shape)
        if key not in self.memory:
            self.memory[key] = torch.randn(4, device=h.device)
        self.total = self.total + h.mean()
        self.steps += 1
        return h + self.memory[key] + self.total * self.steps

    run(rule, [lambda m: m.memory.clear()], memory={}, total=0.0, steps=0)


def attributes_of_tensors():
    def rule(self, h):
        h.scale = 2.0
        out = h * h.scale + getattr(self.layer.weight, "bonus", 1.0)
        out.note = "kept"
        return out

    run(rule, [lambda m: setattr(m.layer.weight, "bonus", 5.0)])


def defaults_and_settings():
    def rule(_, h):
        made = torch.ones(4, device=h.device).to(torch.get_default_dtype())
        return (
            h * made.sum().item() + made.element_size() + (1.0 if torch.is_grad_enabled() else 2.0)
        )

    run(rule, [lambda m: setattr(m, "more", 1)])
    model = Net(lambda _, h: h + (1.0 if torch.is_grad_enabled() else 2.0)).to(device)
    results["with"] = model(torch.ones(1, 4, device=device)).detach().cpu()
    with torch.no_grad():
        results["without"] = model(torch.ones(1, 4, device=device)).cpu()
    with torch.inference_mode():
        found = model(torch.ones(1, 4, device=device))
    results["inference"] = found.cpu().clone()
    assert found.is_inference()


globals()[what]()
torch.save(results, path)
