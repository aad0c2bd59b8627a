"""Tensors of rows of several lengths: KIND of torch.nested."""

import sys

import torch
from torch import nn

path, kind = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
rows = [torch.randn(length, 6) for length in (3, 5, 2)]
model = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).to(device).eval()
results = {}
with torch.no_grad():
    if kind == "strided":
        nested = torch.nested.nested_tensor(rows, device=device)
    elif kind == "as_nested":
        nested = torch.nested.as_nested_tensor([row.to(device) for row in rows])
    elif kind == "jagged":
        nested = torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)
    else:
        values = torch.cat(rows).to(device)
        offsets = torch.tensor([0, 3, 8, 10]).to(device)
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    found = model(nested)
    results["parts"] = [part.cpu() for part in found.unbind()]
    results["padded"] = torch.nested.to_padded_tensor(found, -1.0).cpu()
torch.save(results, path)
