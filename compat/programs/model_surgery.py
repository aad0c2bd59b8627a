"""Changes a model after it was made, as people do between two calls: CHANGE."""

import copy
import io
import sys
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

path, change = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
x = torch.randn(6, 16).to(device)
results = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


def note(name, value):
    results[name] = value.detach().cpu().clone()


def new_head():
    model = Net().eval().to(device)
    note("before", model(x))
    model.head = nn.Linear(16, 9).to(device)
    note("after", model(x))
    model.head = nn.Identity()
    note("features", model(x))


def inserted_layer():
    model = Net().eval().to(device)
    note("before", model(x))
    model.body.insert(2, nn.LayerNorm(32).to(device))
    note("inserted", model(x))
    model.body.append(nn.Tanh())
    note("appended", model(x))
    del model.body[2]
    note("removed", model(x))


def extracted_features():
    model = Net().eval().to(device)
    seen = {}
    handles = [
        layer.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.detach()}))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    model(x)
    for name, value in seen.items():
        note(name, value)
    for handle in handles:
        handle.remove()
    seen.clear()
    note("plain", model(x))
    assert not seen


def hook_with_keywords():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, *, scale=1.0):
            return self.layer(x) * scale

    model = Scaled().to(device).eval()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "scale": 3.0}), with_kwargs=True
    )
    model.register_forward_hook(lambda _, __, ___, out: out + 1, with_kwargs=True)
    note("hooked", model(x, scale=2.0))


def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.decode = nn.Linear(16, 20, bias=False)
            self.decode.weight = self.embed.weight

        def forward(self, tokens):
            return self.decode(self.embed(tokens))

    model = Tied().eval().to(device)
    tokens = torch.randint(0, 20, (3, 5)).to(device)
    assert model.embed.weight is model.decode.weight
    note("before", model(tokens))
    with torch.no_grad():
        model.embed.weight[0].zero_()
        model.embed.weight.mul_(2)
    note("after", model(tokens))
    assert len(list(model.parameters())) == 1


def moving_average():
    model = Net().to(device)
    shadow = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(shadow.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        note("shadow", shadow(x))
    note("model", model.eval()(x))


def loaded_partly():
    donor, model = Net(), Net().eval().to(device)
    state = {k.replace("body.", "body."): v for k, v in donor.state_dict().items() if "body" in k}
    missing = model.load_state_dict(state, strict=False)
    assert sorted(missing.missing_keys) == ["head.bias", "head.weight"]
    note("loaded", model(x))
    model.load_state_dict({k: v.to(device) for k, v in donor.state_dict().items()}, assign=True)
    note("assigned", model(x))


def mapped_locations():
    model = Net().eval().to(device)
    note("before", model(x))
    file = io.BytesIO()
    torch.save({"state": model.state_dict(), "epoch": 3, "shape": x.shape}, file)
    for where in ("cpu", device, {"cuda:0": "cpu"}, lambda storage, _: storage):
        file.seek(0)
        found = torch.load(file, map_location=where, weights_only=not callable(where))
        again = Net().eval().to(device)
        again.load_state_dict(found["state"])
        note(f"again{len(results)}", again(x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    whole = torch.load(file, weights_only=False)
    note("whole", whole(x))


def frozen_body():
    model = Net().to(device)
    model.body.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        loss = F.cross_entropy(model(x), torch.arange(6, device=device) % 4)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    assert all(p.grad is None for p in model.body.parameters())
    note("loss", loss)
    note("after", model.eval()(x))


def applied_initialisation():
    def init(layer):
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.constant_(layer.bias, 0.1)

    model = Net().eval().to(device)
    note("before", model(x))
    torch.manual_seed(3)
    model.apply(init)
    note("after", model(x))


def symmetric_weight():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).transpose(-1, -2)

        def right_inverse(self, weight):
            return weight.triu()

    layer = nn.Linear(16, 16).to(device).eval()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    note("first", layer(x))
    with parametrize.cached():
        note("cached", layer(x) + layer(x))
    layer.weight = torch.eye(16).to(device)
    note("assigned", layer(x))
    parametrize.remove_parametrizations(layer, "weight")
    note("removed", layer(x))


def structured_answers():
    Pair = namedtuple("Pair", "logits hidden")

    @dataclass
    class Output:
        logits: torch.Tensor
        states: tuple
        loss: torch.Tensor | None = None

    class Many(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.net, self.kind = Net(), kind

        def forward(self, batch, mask=None, **options):
            hidden = self.net.body(batch["x"])
            logits = self.net.head(hidden)
            if mask is not None:
                logits = logits.masked_fill(mask, options.get("fill", -1e4))
            if self.kind == "pair":
                return Pair(logits, hidden)
            if self.kind == "data":
                return Output(logits, (hidden, hidden * 2))
            return OrderedDict(logits=logits, states=[hidden, None, 3, "name"])

    mask = (torch.arange(4) > 2).to(device)
    pair = Many("pair").to(device).eval()({"x": x})
    note("pair", pair.logits + pair[1].sum())
    data = Many("data").to(device).eval()({"x": x}, mask)
    assert data.loss is None
    note("data", data.logits + data.states[1].mean())
    found = Many("dict").to(device).eval()({"x": x}, mask=mask, fill=-1.0)
    assert found["states"][1:] == [None, 3, "name"]
    note("dict", found["logits"])


def remembered_activations():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last, self.calls, self.seen = Net(), None, 0, []

        def forward(self, x):
            self.calls += 1
            hidden = self.net.body(x)
            if self.last is not None:
                hidden = hidden + 0.5 * self.last
            self.last = hidden.detach()
            self.seen.append(tuple(hidden.shape))
            return self.net.head(hidden)

    model = Remembers().to(device).eval()
    for step in range(4):
        note(f"step{step}", model(x))
    assert model.calls == 4
    assert len(model.seen) == 4
    note("last", model.last)


def growing_module_list():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.gates = nn.ParameterList(torch.ones(16) * i for i in range(3))
            self.heads = nn.ModuleDict({"a": nn.Linear(16, 2), "b": nn.Linear(16, 3)})

        def forward(self, x, head):
            for block, gate in zip(self.blocks, self.gates, strict=True):
                x = x + F.gelu(block(x)) * gate
            return self.heads[head](x)

    model = Stack().to(device).eval()
    note("a", model(x, "a"))
    note("b", model(x, "b"))
    model.blocks.append(nn.Linear(16, 16).to(device))
    model.gates.append(nn.Parameter(torch.ones(16).to(device)))
    model.heads["c"] = nn.Linear(16, 5).to(device)
    note("c", model(x, "c"))
    del model.heads["a"]
    note("b2", model(x, "b"))


def low_rank_wrapper():
    class LowRank(nn.Module):
        def __init__(self, base, rank=2):
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("base"), name)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = Net().eval().to(device)
    note("before", model(x))
    for index in (0, 2):
        model.body[index] = LowRank(model.body[index]).to(device)
    assert model.body[0].out_features == 32
    note("wrapped", model(x))
    for index in (0, 2):
        layer = model.body[index]
        with torch.no_grad():
            layer.base.weight += layer.up.weight @ layer.down.weight
        model.body[index] = layer.base
    note("merged", model(x))


def folded_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(device)
    images = torch.randn(2, 3, 9, 9).to(device)
    for _ in range(3):
        note(f"training{len(results)}", model(images))
    model.eval()
    note("evaluated", model(images))
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    note("fused", F.relu(fused(images)))
    model[1].reset_running_stats()
    note("reset", model(images))
    model[1].momentum = None
    model.train()(images)
    note("cumulative", model.eval()(images))


def changed_precision():
    model = Net().eval().to(device)
    note("single", model(x))
    note("double", model.double()(x.double()))
    note("half", model.half()(x.half()).float())
    note("back", model.float()(x))
    note("typed", model.to(device, torch.bfloat16)(x.bfloat16()))
    model.to("cpu")
    assert not next(model.parameters()).is_cuda
    note("cpu", model.float()(x.cpu()))
    note("again", model.to(device)(x))


def own_methods():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(16, 3), nn.Linear(3, 16)
            self.register_buffer("mean", torch.ones(3), persistent=False)

        def encode(self, x):
            return self.down(x) - self.mean

        @torch.no_grad()
        def decode(self, z):
            return self.up(z + self.mean)

        def forward(self, x):
            return self.decode(self.encode(x))

    model = Coder().to(device).eval()
    note("code", model.encode(x))
    note("decoded", model.decode(model.encode(x)))
    note("whole", model(x))
    assert "mean" not in model.state_dict()
    note("compiled", torch.compile(model.encode)(x))


def bound_methods():
    model = Net().eval().to(device)
    native = model.forward

    def doubled(x):
        return native(x) * 2

    note("before", model(x))
    model.forward = doubled
    note("replaced", model(x))
    model.forward = native
    note("restored", model(x))
    model.body.forward = lambda x: x
    note("skipped", model(x))


globals()[change]()
torch.save(results, path)
