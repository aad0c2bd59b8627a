"""Asks for gradients at what a model computed on its way: HOW."""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

path, how = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
results = {}


def note(name, value):
    results[name] = value.detach().cpu().clone()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


def by_hook():
    model, kept = Net().to(device).eval(), {}
    model.body.register_forward_hook(lambda _, __, out: kept.update(body=out))
    for call in range(3):
        logits = model(torch.ones(2, 4, device=device) * call)
        (found,) = torch.autograd.grad(logits[:, 1].sum(), kept["body"])
        note(f"found{call}", found)


def by_attribute():
    class Keeps(Net):
        def forward(self, x):
            self.hidden = self.body(x)
            return self.head(self.hidden.relu())

    model = Keeps().to(device).eval()
    for call in range(3):
        logits = model(torch.ones(2, 4, device=device) * call)
        (found,) = torch.autograd.grad(logits.square().sum(), model.hidden)
        note(f"found{call}", found)


def by_output():
    class Both(Net):
        def forward(self, x):
            hidden = self.body(x)
            return self.head(hidden.relu()), hidden

    model = Both().to(device).eval()
    for call in range(3):
        logits, hidden = model(torch.ones(2, 4, device=device) * call)
        hidden.retain_grad()
        (logits.sum() + hidden.square().sum()).backward()
        note(f"found{call}", hidden.grad)
        note(f"weight{call}", model.body[0].weight.grad)
        model.zero_grad()


def by_retained_gradient():
    class Retains(Net):
        def forward(self, x):
            self.hidden = self.body(x)
            self.hidden.retain_grad()
            return self.head(self.hidden.relu())

    model = Retains().to(device).eval()
    for call in range(3):
        model(torch.ones(2, 4, device=device) * call).square().sum().backward()
        note(f"found{call}", model.hidden.grad)


def by_backward_hook():
    model, kept = Net().to(device).eval(), []
    model.body[0].register_full_backward_hook(lambda _, gets, gives: kept.append(gives[0]))
    model.body[2].register_full_backward_pre_hook(lambda _, gives: kept.append(gives[0]))
    for call in range(3):
        model(torch.ones(2, 4, device=device) * call).square().sum().backward()
    for number, found in enumerate(kept):
        note(f"found{number}", found)


def by_function():
    seen = []

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient.abs().sum())
            return -ctx.scale * gradient, None

    class Adversarial(Net):
        def forward(self, x):
            return self.head(Reversed.apply(self.body(x), 0.5))

    model = Adversarial().to(device)
    for call in range(3):
        model.zero_grad()
        model(torch.ones(2, 4, device=device) * call).square().sum().backward()
        note(f"found{call}", model.body[0].weight.grad)
        note(f"seen{call}", seen[call])


def by_parts():
    model = Net().to(device).eval()
    for call in range(3):
        hidden = model.body(torch.ones(2, 4, device=device) * call)
        hidden.retain_grad()
        model.head(hidden.relu())[:, 0].sum().backward()
        note(f"found{call}", hidden.grad)


def by_embedding():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.embed(ids).mean(1))

    model, kept = Words().to(device).eval(), []
    handle = model.embed.register_forward_hook(lambda _, __, out: kept.append(out))
    ids = torch.tensor([[1, 2, 3]], device=device)
    for call in range(2):
        logits = model(ids + call)
        (found,) = torch.autograd.grad(F.log_softmax(logits, -1)[0, 0], kept[-1])
        note(f"found{call}", found)
    handle.remove()
    note("after", model(ids))


def by_integration():
    model = Net().to(device).eval()
    x, total = torch.ones(1, 4, device=device), torch.zeros(1, 4, device=device)
    for step in range(1, 5):
        scaled = (x * step / 4).requires_grad_()
        model(scaled)[0, 1].backward()
        total += scaled.grad / 4
    note("found", total * x)
    jacobian = torch.autograd.functional.jacobian(model, x)
    note("jacobian", jacobian)
    note("hessian", torch.autograd.functional.hessian(lambda given: model(given).sum(), x))


def by_view():
    class Views(Net):
        def forward(self, x):
            hidden = self.body(x)
            flat = hidden.view(-1)
            return hidden, flat, hidden.t(), self.head(flat.view(2, 6).relu()), hidden.detach()

    model = Views().to(device).eval()
    for call in range(2):
        hidden, flat, turned, logits, cut = model(torch.ones(2, 4, device=device) * call)
        assert not cut.requires_grad
        total = logits.sum() + flat.square().sum() + turned[0].sum()
        for name, found in zip(
            "hft",
            torch.autograd.grad(total, (hidden, flat, turned), retain_graph=True),
            strict=True,
        ):
            note(f"{name}{call}", found)
        total.backward()
        note(f"weight{call}", model.body[0].weight.grad)


def by_written_activation():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).to(device)
    kept = []
    model[0].register_forward_hook(lambda _, __, out: kept.append(out))
    for call in range(3):
        answer = model(torch.ones(2, 4, device=device) * call)
        note(f"kept{call}", kept[-1])
        (found,) = torch.autograd.grad(answer.square().sum(), kept[-1])
        note(f"found{call}", found)


def by_dropout():
    class Drops(Net):
        def forward(self, x):
            hidden = F.dropout(self.body(x), 0.5)
            return self.head(F.dropout(hidden, 0.5)), hidden

    model = Drops().to(device).train()
    for call in range(2):
        logits, hidden = model(torch.ones(2, 4, device=device) * call)
        (first,) = torch.autograd.grad(logits.square().sum(), hidden, create_graph=True)
        note(f"first{call}", first)
        (first.square().sum() + hidden.square().sum()).backward()
        note(f"weight{call}", model.head.weight.grad)
        note(f"body{call}", model.body[2].weight.grad)


def never_asked():
    class Both(Net):
        def forward(self, x):
            hidden = self.body(x)
            return self.head(hidden.relu()), hidden, hidden.sum().item() > 1e9

    model = Both().to(device).eval()
    for call in range(4):
        logits, hidden, _ = model(torch.randn(2, 4).to(device))
        note(f"logits{call}", logits)
        note(f"hidden{call}", hidden)


def hooked_inside():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.seen = nn.Linear(4, 8), nn.Linear(8, 2), []

        def forward(self, x):
            hidden = self.body(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self.seen.append(gradient))
                hidden.register_hook(lambda gradient: gradient * 2)
            return self.head(hidden)

    model = Watched().to(device)
    for call in range(3):
        model.zero_grad()
        answer = model(torch.ones(3, 4, device=device) * call)
        note(f"answer{call}", answer)
        if call:
            answer.square().sum().backward()
            note(f"gradient{call}", model.body.weight.grad)
    note("seen", torch.stack(model.seen))
    with torch.no_grad():
        note("plain", model(torch.ones(3, 4, device=device)))


globals()[how]()
torch.save(results, path)
