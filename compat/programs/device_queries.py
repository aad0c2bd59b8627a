"""Asks about the device as programs do before they start, then runs on what it found."""

import sys

import torch
from torch import nn

path = sys.argv[1]
torch.manual_seed(0)


def describe():
    if not torch.cuda.is_available():
        return torch.device("cpu")
    assert torch.cuda.device_count() >= 1
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    major, _ = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info()
    print(torch.cuda.get_device_name(index), properties.total_memory, properties.major)
    assert properties.multi_processor_count > 0
    assert properties.name == torch.cuda.get_device_name()
    assert major >= 5
    assert 0 < free <= total
    assert torch.cuda.memory_allocated() >= 0
    assert torch.cuda.max_memory_allocated() >= 0
    assert torch.cuda.memory_reserved() >= 0
    assert isinstance(torch.cuda.memory_summary(), str)
    assert isinstance(torch.cuda.is_bf16_supported(), bool)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.manual_seed_all(0)
    with torch.cuda.device(0):
        assert torch.zeros(1, device="cuda").get_device() == 0
    if torch.accelerator.is_available():
        assert torch.accelerator.current_accelerator().type == "cuda"
    return torch.device("cuda", index)


device = describe()
model = nn.Linear(10, 4).to(device)
results = {}
for call in range(3):
    x = torch.randn(2, 10).to(device)
    y = model(x)
    assert y.device == device
    assert y.is_cuda == (device.type == "cuda")
    assert y.device == next(model.parameters()).device
    assert str(device.type) in str(y.device)
    assert ("cuda" in repr(y)) == (device.type == "cuda")
    if device.type == "cuda":
        assert torch.cuda.memory_allocated() > 0
        assert y.type() == "torch.cuda.FloatTensor"
        assert torch.Tensor([1.0]).cuda().is_cuda
        try:
            y.detach().numpy()
        except TypeError as error:
            assert "cuda" in str(error)
        else:
            raise AssertionError("numpy() of a CUDA tensor must be refused")
        try:
            y + torch.ones(2, 4)
        except RuntimeError as error:
            assert "same device" in str(error)
        else:
            raise AssertionError("tensors of two devices must be refused")
    results[f"y{call}"] = y.detach().cpu()
torch.save(results, path)
