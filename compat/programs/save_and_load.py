"""torch.save and torch.load: whole models, state dicts, tensors, with and without map_location."""

import copy
import io
import pickle
import sys

import torch
from torch import nn

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def through_a_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def make():
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 5))


model = make().to(device).eval()
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(3, 2, 8).to(device)
model(x).sum().backward()
optimizer.step()

checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
loaded = through_a_file(checkpoint, map_location=device)
plain = through_a_file(checkpoint, map_location="cpu")
fresh = make().eval()
fresh.load_state_dict(plain["model"])
fresh.to(device)
again = make().to(device).eval()
again.load_state_dict(loaded["model"])
models = {
    "saved": model,
    "fresh": fresh,
    "again": again,
    "whole": through_a_file(model, map_location=device, weights_only=False),
    "copied": copy.deepcopy(model),
    "pickled": pickle.loads(pickle.dumps(model)),
}
results = {"epoch": loaded["epoch"], "keys": list(loaded["model"])}
results["plain on cpu"] = all(v.device.type == "cpu" for v in plain["model"].values())
results["tensor"] = through_a_file(x).cpu()
results["kind"] = type(through_a_file(x)).__name__
results["step"] = float(plain["optimizer"]["state"][0]["step"])
with torch.no_grad():
    for call in range(3):
        x = torch.randn(3, 2, 8, device=device)
        for name, entry in models.items():
            results[f"{name}{call}"] = entry(x).cpu()
torch.save(results, path)
