"""A spawned child that serves requests from a queue while the parent has a model of its own."""

import sys

import torch
import torch.multiprocessing as mp
from torch import nn


def make(seed):
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2)).to(device).eval(), device


def child(requests, answers):
    model, device = make(1)
    while (x := requests.get()) is not None:
        with torch.no_grad():
            answers.put(model(torch.tensor(x, device=device)).tolist())


def main(path):
    context = mp.get_context("spawn")
    requests, answers = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(requests, answers))
    process.start()
    model, device = make(0)
    results = {}
    for call in range(4):
        x = torch.randn(2, 5)
        requests.put(x.tolist())
        with torch.no_grad():
            results[f"parent{call}"] = model(x.to(device)).cpu()
        results[f"child{call}"] = torch.tensor(answers.get(timeout=60))
    requests.put(None)
    process.join()
    results["status"] = process.exitcode
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])
