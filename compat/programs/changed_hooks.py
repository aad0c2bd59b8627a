"""Hooks added, removed and changed between calls, on modules, globally and on tensors."""

import sys

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).to(device).eval()
x = torch.randn(2, 5, device=device)
results = {"seen": []}


def ask(name):
    with torch.no_grad():
        results[name] = model(x).cpu()


ask("plain")
ask("plain again")
handle = model[0].register_forward_hook(lambda _m, _i, output: output * 2)
ask("doubled")
second = model[2].register_forward_pre_hook(lambda _m, inputs: (inputs[0] + 1,))
ask("doubled and shifted")
handle.remove()
ask("shifted")
outer = model.register_forward_hook(lambda _m, _i, output: results["seen"].append(output.shape[0]))
ask("watched")
second.remove()
ask("watched only")
outer.remove()
ask("plain once more")
everywhere = register_module_forward_hook(
    lambda module, _i, output: output + 1 if isinstance(module, nn.ReLU) else None
)
ask("hook on all modules")
everywhere.remove()
ask("no hook on all modules")
keyword = model[0].register_forward_pre_hook(
    lambda _m, inputs, options: ((inputs[0] * 0.5,), options), with_kwargs=True
)
ask("with keywords")
keyword.remove()
always = model[1].register_forward_hook(lambda _m, _i, output: output - 1, always_call=True)
ask("always")
always.remove()
ask("last")
torch.save(results, path)
