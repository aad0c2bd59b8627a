"""A model in another form that torch or a library gives it: FORM."""

import copy
import io
import sys
import warnings

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

path, form = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
example = torch.randn(4, 32)


def exported():
    program = torch.export.export(model, (example,))
    return program.module().to(device)


def exported_dynamic():
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(
        model.to(device), (example.to(device),), dynamic_shapes=({0: rows},)
    )
    return program.module()


def traced_symbolically():
    return torch.fx.symbolic_trace(model).to(device)


def pruned():
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model.to(device)


def pruned_for_good():
    prune.random_unstructured(model[0], "weight", amount=0.3)
    prune.remove(model[0], "weight")
    return model.to(device)


def checkpointed():
    model.to(device)
    return lambda x: checkpoint(model, x, use_reentrant=False)


def checkpointed_parts():
    model.to(device)
    return lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False)


def copied():
    return copy.deepcopy(model.to(device))


def pickled():
    file = io.BytesIO()
    torch.save(model.to(device), file)
    file.seek(0)
    return torch.load(file, weights_only=False, map_location=device)


def fused():
    chain = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64)).eval()
    return torch.nn.utils.fuse_linear_bn_eval(chain[0], chain[1]).to(device)


def quantized_dynamically():
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def torchao_int8():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model.to(device)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def quanto_int8():
    from optimum.quanto import freeze, qint8, quantize

    model.to(device)
    quantize(model, weights=qint8)
    freeze(model)
    return model


def sparse_weight():
    weight = model[0].weight.detach().clone()
    weight[weight.abs() < 0.1] = 0
    sparse = weight.to_sparse_csr().to(device)
    return lambda x: torch.sparse.mm(sparse, x.to(device).T).T


def coordinate_sparse():
    index = torch.tensor([[0, 1, 2], [2, 0, 1]])
    sparse = torch.sparse_coo_tensor(index, torch.ones(3), (3, 4)).to(device)
    return lambda x: torch.sparse.mm(sparse, x.to(device))


def masked():
    from torch.masked import masked_tensor

    model.to(device)
    return lambda x: masked_tensor(model(x), model(x) > 0).sum(1).to_tensor(0.0)


def half_and_back():
    return model.half().float().to(device)


def profiled():
    from torch.profiler import profile

    model.to(device)

    def run(x):
        with profile() as found:
            y = model(x)
        assert found.key_averages()
        return y

    return run


def meta_then_empty():
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    made = made.to_empty(device=device)
    made.load_state_dict(model.state_dict())
    return made.eval()


def swapped_parts():
    model.to(device)
    model[1] = nn.GELU()
    model.append(nn.LayerNorm(32).to(device))
    return model


def compiled_by_own_backend():
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    run = torch.compile(model.to(device), backend=backend)

    def counted(x):
        return torch.cat([run(x).flatten(), torch.tensor([len(graphs)]).to(device)])

    return counted


use = globals()[form]()
results = {}
with torch.no_grad():
    for call in range(3):
        x = torch.randn(4, 32)
        results[f"y{call}"] = use(x if form == "quantized_dynamically" else x.to(device)).cpu()
torch.save(results, path)
