"""Saliency and an adversarial step: gradients with respect to the input of a frozen model."""

import sys

import torch
import torch.nn.functional as F
from torchvision.models import resnet18

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = resnet18(num_classes=10).to(device).eval()
for parameter in model.parameters():
    parameter.requires_grad_(False)

results = {}
for call in range(3):
    picture = torch.rand(1, 3, 48, 48, device=device, requires_grad=True)
    scores = model(picture)
    loss = F.cross_entropy(scores, torch.tensor([call], device=device))
    loss.backward()
    saliency = picture.grad.abs().amax(dim=1)
    changed = (picture + 0.03 * picture.grad.sign()).clamp(0, 1).detach()
    with torch.no_grad():
        after = F.cross_entropy(model(changed), torch.tensor([call], device=device))
    (again,) = torch.autograd.grad(model(picture).max(), picture)
    results[f"saliency{call}"] = saliency.cpu()
    results[f"loss{call}"] = loss.item()
    results[f"after{call}"] = after.item()
    results[f"again{call}"] = again.cpu()
    results[f"leaf{call}"] = [picture.grad.device.type == device, picture.is_leaf]
torch.save(results, path)
