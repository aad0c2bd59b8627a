"""Forward hooks that read and change activations, pre-hooks, and backward hooks."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device).eval()
activations = {}
gradients = []


def keep(name):
    def hook(_module, _inputs, output):
        activations[name] = output.detach()

    return hook


def double(_module, inputs):
    return (inputs[0] * 2,)


def clip(_module, _inputs, output):
    return output.clamp(-0.5, 0.5)


for name, layer in model.named_children():
    layer.register_forward_hook(keep(name))
model[0].register_forward_pre_hook(double)
model[2].register_forward_hook(clip)
model.register_full_backward_hook(lambda _module, _inputs, outputs: gradients.append(outputs[0]))

results = {}
for call in range(4):
    x = torch.randn(3, 8, device=device)
    if call % 2:
        with torch.no_grad():
            output = model(x)
    else:
        output = model(x)
        output.sum().backward()
    results[f"output{call}"] = output.detach().cpu()
    results[f"activations{call}"] = {key: value.cpu() for key, value in activations.items()}
    results[f"on device{call}"] = all(v.device.type == device for v in activations.values())
results["gradients"] = [gradient.cpu() for gradient in gradients]
results["weight"] = model[0].weight.grad.cpu()
torch.save(results, path)
