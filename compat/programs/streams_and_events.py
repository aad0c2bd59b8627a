"""Side streams, and events that time the calls; times are checked but not kept."""

import sys

import torch
from torch import nn

path = sys.argv[1]
cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device).eval()


def timed(call):
    if not cuda:
        return call(), 0.0
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    answer = call()
    end.record()
    torch.cuda.synchronize()
    return answer, start.elapsed_time(end)


results = {}
with torch.no_grad():
    for call in range(4):
        x = torch.randn(16, 64).to(device, non_blocking=True)
        answer, took_ms = timed(lambda x=x: model(x))
        results[f"answer{call}"] = answer.cpu()
        results[f"sane{call}"] = 0 <= took_ms < 60_000
    if cuda:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = model(x)
            y.record_stream(stream)
            done = stream.record_event()
        torch.cuda.current_stream().wait_event(done)
        done.synchronize()
        assert done.query()
        assert stream.query()
        stream.synchronize()
        with torch.cuda.nvtx.range("call"):
            model(x)
    else:
        y = model(x)
results["y"] = y.cpu()
torch.save(results, path)
