"""Functions under torch.compile, without a module and without weights: a filter, spectra, codes."""

import sys

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"


@torch.compile(backend="eager")
def filtered(x, spread, motion, seen, noise, measured):
    x, spread = motion @ x, motion @ spread @ motion.T + 0.1 * torch.eye(2, device=x.device)
    gain = spread @ seen.T @ torch.linalg.inv(seen @ spread @ seen.T + noise)
    x = x + gain @ (measured - seen @ x)
    return x, (torch.eye(2, device=x.device) - gain @ seen) @ spread


@torch.compile(backend="eager")
def spectrum(x):
    window = torch.hann_window(64, device=x.device)
    return torch.stft(x, 64, 16, window=window, return_complex=True).abs().log1p()


@torch.compile(backend="eager", dynamic=True)
def codes(x, centres):
    return torch.cdist(x, centres).argmin(1)


path = sys.argv[1]
torch.manual_seed(0)
motion = torch.tensor([[1.0, 1.0], [0.0, 1.0]], device=device)
seen, noise = torch.tensor([[1.0, 0.0]], device=device), torch.eye(1, device=device)
x, spread = torch.zeros(2, 1, device=device), torch.eye(2, device=device)
results = {}
for step in range(8):
    x, spread = filtered(x, spread, motion, seen, noise, torch.full((1, 1), step, device=device))
    results[f"state{step}"], results[f"spread{step}"] = x.cpu(), spread.cpu()
    results[f"spectrum{step}"] = spectrum(torch.randn(2, 256, device=device)).cpu()
    points = torch.randn(10 + step, 4, device=device)
    results[f"codes{step}"] = codes(points, torch.randn(5, 4, device=device)).cpu()
torch.save(results, path)
