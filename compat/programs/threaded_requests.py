"""Threads that call one model at once, each with its own inputs, and a thread that loads one."""

import sys
import threading

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)).to(device).eval()
inputs = [[torch.randn(2 + n % 3, 16) for n in range(8)] for _ in range(4)]
results = {}
errors = []
own = {}


def serve(number):
    try:
        with torch.no_grad():
            for call, x in enumerate(inputs[number]):
                results[f"{number}.{call}"] = model(x.to(device)).cpu()
    except RuntimeError as error:
        errors.append(str(error))


def load_and_serve():
    layer = nn.Linear(16, 3)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.zeros_(layer.bias)
    own["layer"] = layer.to(device)
    with torch.inference_mode():
        results["own"] = own["layer"](inputs[0][0].to(device)).cpu()


threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
threads.append(threading.Thread(target=load_and_serve))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
results["errors"] = errors
torch.save(dict(sorted(results.items())), path)
