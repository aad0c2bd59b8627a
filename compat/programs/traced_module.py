"""A traced and frozen network, and one traced after it was moved to the device."""

import sys

import torch
from torchvision.models import squeezenet1_1

path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = squeezenet1_1(num_classes=7).eval()
example = torch.rand(1, 3, 64, 64)
with torch.no_grad():
    before = torch.jit.trace(model, example).to(device)
    model = model.to(device)
    after = torch.jit.trace(model, example.to(device))

results = {}
with torch.no_grad():
    for call in range(3):
        pictures = torch.rand(1, 3, 64, 64, device=device)
        results[f"before{call}"] = before(pictures).cpu()
        results[f"after{call}"] = after(pictures).cpu()
        results[f"plain{call}"] = model(pictures).cpu()
torch.save(results, path)
