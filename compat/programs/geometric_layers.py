"""Passes messages over small random graphs with a layer of torch_geometric: LAYER."""

import sys
import time

import torch
import torch_geometric.nn as layers
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.utils import add_self_loops, to_dense_batch

path, name = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def perceptron(inputs=6):
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 8))


LAYERS = {
    "GCNConv": lambda: layers.GCNConv(6, 8),
    "GATConv": lambda: layers.GATConv(6, 4, heads=2),
    "GATv2Conv": lambda: layers.GATv2Conv(6, 4, heads=2),
    "SAGEConv": lambda: layers.SAGEConv(6, 8),
    "GINConv": lambda: layers.GINConv(perceptron()),
    "GraphConv": lambda: layers.GraphConv(6, 8, aggr="max"),
    "ChebConv": lambda: layers.ChebConv(6, 8, K=3),
    "TAGConv": lambda: layers.TAGConv(6, 8),
    "SGConv": lambda: layers.SGConv(6, 8, K=2),
    "APPNP": lambda: layers.APPNP(3, 0.1),
    "ARMAConv": lambda: layers.ARMAConv(6, 8),
    "TransformerConv": lambda: layers.TransformerConv(6, 8),
    "EdgeConv": lambda: layers.EdgeConv(perceptron(12)),
    "PNAConv": lambda: layers.PNAConv(
        6, 8, ["mean", "max", "std"], ["identity", "linear"], torch.tensor([0, 3, 5, 2])
    ),
    "GatedGraphConv": lambda: layers.GatedGraphConv(8, 2),
    "ResGatedGraphConv": lambda: layers.ResGatedGraphConv(6, 8),
    "GENConv": lambda: layers.GENConv(6, 8),
    "ClusterGCNConv": lambda: layers.ClusterGCNConv(6, 8),
    "LEConv": lambda: layers.LEConv(6, 8),
    "SuperGATConv": lambda: layers.SuperGATConv(6, 8),
    "FAConv": lambda: layers.FAConv(6),
    "GCN2Conv": lambda: layers.GCN2Conv(6, 0.1),
    "MixHopConv": lambda: layers.MixHopConv(6, 4),
    "FiLMConv": lambda: layers.FiLMConv(6, 8),
    "HypergraphConv": lambda: layers.HypergraphConv(6, 8),
}
POOLINGS = {
    "TopKPooling": lambda: layers.TopKPooling(8, ratio=0.5),
    "SAGPooling": lambda: layers.SAGPooling(8, ratio=0.5),
    "ASAPooling": lambda: layers.ASAPooling(8, ratio=0.5),
}


class Network(nn.Module):
    """The layer, a normalisation, and one vector a graph."""

    def __init__(self):
        super().__init__()
        self.pooling = POOLINGS[name]() if name in POOLINGS else None
        self.layer = layers.GCNConv(6, 8) if name in POOLINGS else LAYERS[name]()
        self.norm = layers.GraphNorm(8 if name not in {"FAConv", "GCN2Conv", "APPNP"} else 6)
        if name == "MixHopConv":
            self.norm = layers.GraphNorm(12)

    def forward(self, x, edges, batch):
        extra = (x,) if name in {"FAConv", "GCN2Conv"} else ()
        seen = self.norm(self.layer(x, *extra, edges).relu(), batch)
        if self.pooling is not None:
            seen, _, _, batch, *_ = self.pooling(seen, edges, batch=batch)
        return layers.global_mean_pool(seen, batch), layers.global_max_pool(seen, batch)


def graphs():
    """Two graphs as one."""
    both = []
    for count in (7, 5):
        edges = torch.randint(0, count, (2, 16))
        both.append(Data(x=torch.randn(count, 6), edge_index=add_self_loops(edges)[0]))
    return Batch.from_data_list(both)


model = Network().eval().to(device)
results = {}
with torch.no_grad():
    for call in range(3):
        data = graphs().to(device)
        start = time.perf_counter()
        mean, most = model(data.x, data.edge_index, data.batch)
        results[f"mean{call}"], results[f"max{call}"] = mean.cpu(), most.cpu()
        if call == 0:
            print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    dense, mask = to_dense_batch(data.x, data.batch)
    results["dense"], results["mask"] = dense.cpu(), mask.cpu()
torch.save(results, path)
