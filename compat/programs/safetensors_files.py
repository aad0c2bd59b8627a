"""Weights written as safetensors and read straight onto the device."""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)).to(device).eval()

results = {}
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "model.safetensors"
    save_file(model.state_dict(), file)
    weights = load_file(file, device=device)
    with safe_open(file, framework="pt", device=device) as reader:
        bias = reader.get_tensor("0.bias")
other = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)).to(device).eval()
other.load_state_dict(weights)
results["on device"] = {name: value.device.type == device for name, value in weights.items()}
results["bias"] = torch.equal(bias, model[0].bias)
with torch.no_grad():
    for call in range(3):
        x = torch.randn(2, 6, device=device)
        results[f"other{call}"] = other(x).cpu()
        results[f"same{call}"] = torch.equal(other(x), model(x))
torch.save(results, path)
