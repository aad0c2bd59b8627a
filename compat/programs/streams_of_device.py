"""Streams and events by torch's names that work for every accelerator."""

import sys

import torch
from torch import nn

path = sys.argv[1]
torch.manual_seed(0)
model = nn.Linear(6, 3).eval()
x = torch.randn(4, 6)
results = {}
with torch.no_grad():
    if torch.cuda.is_available():
        model, x = model.cuda(), x.cuda()
        stream, done = torch.Stream(device="cuda"), torch.Event(device="cuda")
        with stream:
            y = model(x)
            done.record(stream)
        torch.cuda.current_stream().wait_event(done)
        stream.synchronize()
        done.synchronize()
        assert done.query()
    else:
        y = model(x)
results["y"] = y.cpu()
torch.save(results, path)
