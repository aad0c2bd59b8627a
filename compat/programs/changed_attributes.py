"""Plain Python values that forward reads, changed between calls: the next call must see it."""

import sys

import torch
from torch import nn

FACTOR = 1.0
TABLE = {"shift": 0.0}


class Settings:
    def __init__(self):
        self.power = 1
        self.nested = {"deep": [0.0, 1.0]}


class Net(nn.Module):
    level = 1

    def __init__(self, callback):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1
        self.flags = {"negate": False, "clip": None}
        self.weights = [1.0, 2.0]
        self.names = {"one"}
        self.settings = Settings()
        self.callback = callback

    def forward(self, x):
        y = self.layer(x) * self.scale * FACTOR + TABLE["shift"]
        if self.flags["negate"]:
            y = -y
        if self.flags["clip"] is not None:
            y = y.clamp(max=self.flags["clip"])
        for weight in self.weights:
            y = y + weight
        if "two" in self.names:
            y = y * 2
        y = y**self.settings.power + sum(self.settings.nested["deep"])
        return self.callback(y) * self.level


def make_callback():
    amount = 0.0

    def callback(y):
        return y + amount

    def change(value):
        nonlocal amount
        amount = value

    return callback, change


def set_factor(value):
    global FACTOR
    FACTOR = value


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
callback, change = make_callback()
model = Net(callback).to(device).eval()
x = torch.randn(2, 4).to(device)
changes = {
    "attribute": lambda: setattr(model, "scale", 3),
    "float attribute": lambda: setattr(model, "scale", 2.5),
    "dict value": lambda: model.flags.update(negate=True),
    "dict from none": lambda: model.flags.__setitem__("clip", 0.5),
    "list value": lambda: model.weights.__setitem__(0, 5.0),
    "list longer": lambda: model.weights.append(0.25),
    "list shorter": lambda: model.weights.pop(0),
    "set": lambda: model.names.add("two"),
    "nested attribute": lambda: setattr(model.settings, "power", 2),
    "nested list": lambda: model.settings.nested["deep"].append(4.0),
    "other object": lambda: setattr(model, "settings", Settings()),
    "global": lambda: set_factor(0.5),
    "global again": lambda: set_factor(0.75),
    "global dict": lambda: TABLE.update(shift=1.5),
    "closure": lambda: change(10.0),
    "callback": lambda: setattr(model, "callback", lambda y: y - 1),
    "class attribute": lambda: setattr(Net, "level", 2),
    "instance over class": lambda: setattr(model, "level", 3),
    "instance removed": lambda: delattr(model, "level"),
    "tensor to number": lambda: setattr(model, "scale", torch.tensor(2.0, device=device)),
    "tensor in place": lambda: model.scale.add_(1),
}
results = {}
with torch.no_grad():
    results["first"] = model(x).cpu()
    results["second"] = model(x).cpu()
    for name, action in changes.items():
        action()
        results[name] = model(x).cpu()
        results[f"{name}, again"] = model(x).cpu()
torch.save(results, path)
