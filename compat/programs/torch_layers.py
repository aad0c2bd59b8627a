"""Calls small models around one kind of layer of torch.nn: LAYER."""

import sys
import time

import torch
from torch import nn

path, layer = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Recurrent(nn.Module):
    """A recurrent layer's outputs and states, joined."""

    def __init__(self, kind, **how):
        super().__init__()
        self.cell = kind(6, 8, batch_first=True, **how)

    def forward(self, x):
        outputs, states = self.cell(x)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([outputs.flatten(), *(state.flatten() for state in states)])


class Cells(nn.Module):
    """A cell that is called once a step."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(6, 8)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Pairs(nn.Module):
    """A layer of two inputs, which are halves of one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(*x.chunk(2, dim=-1))


class Attention(nn.Module):
    """Self-attention with its weights and a causal mask."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        seen, weights = self.inner(x, x, x, attn_mask=mask)
        return torch.cat([seen.flatten(), weights.flatten()])


class Translator(nn.Module):
    """A whole transformer, from a text to itself."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, x):
        return self.inner(x, x)


class Unpooling(nn.Module):
    """Pools with indices, and back."""

    def __init__(self):
        super().__init__()
        self.pool, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        pooled, indices = self.pool(x)
        return self.back(pooled, indices)


IMAGE, LINE, VOLUME, STEPS = (2, 4, 12, 12), (2, 4, 16), (2, 4, 6, 8, 8), (2, 5, 6)
LAYERS = {
    "conv1d": (LINE, nn.Conv1d(4, 6, 3, dilation=2, padding="same")),
    "conv2d": (IMAGE, nn.Conv2d(4, 6, 3, stride=2, groups=2, padding_mode="reflect", padding=1)),
    "conv3d": (VOLUME, nn.Conv3d(4, 6, 3)),
    "transposed": (IMAGE, nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1)),
    "max_pool": (IMAGE, nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    "avg_pool": (IMAGE, nn.AvgPool2d(3, 2, count_include_pad=False)),
    "lp_pool": (IMAGE, nn.LPPool2d(2, 3)),
    "adaptive_pool": (IMAGE, nn.Sequential(nn.AdaptiveAvgPool2d(5), nn.AdaptiveMaxPool2d((2, 3)))),
    "unpool": (IMAGE, Unpooling()),
    "pads": (IMAGE, nn.Sequential(nn.ReflectionPad2d(1), nn.ReplicationPad2d(2), nn.ZeroPad2d(1))),
    "circular_pad": (IMAGE, nn.CircularPad2d((1, 2, 0, 1))),
    "batch_norm": (IMAGE, nn.BatchNorm2d(4)),
    "group_norm": (IMAGE, nn.GroupNorm(2, 4)),
    "instance_norm": (IMAGE, nn.InstanceNorm2d(4, affine=True)),
    "layer_norm": (IMAGE, nn.LayerNorm((12, 12))),
    "rms_norm": (IMAGE, nn.RMSNorm(12)),
    "local_response_norm": (IMAGE, nn.LocalResponseNorm(2)),
    "spectral_norm": (STEPS, nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))),
    "weight_norm": (STEPS, nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))),
    "orthogonal": (STEPS, nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))),
    "gates": (STEPS, nn.Sequential(nn.GLU(), nn.PReLU(), nn.Hardtanh(), nn.Threshold(0.1, 2))),
    "smooth_gates": (STEPS, nn.Sequential(nn.GELU("tanh"), nn.Mish(), nn.SiLU(), nn.Softplus())),
    "hard_gates": (STEPS, nn.Sequential(nn.Hardswish(), nn.Hardsigmoid(), nn.Hardshrink())),
    "self_gates": (STEPS, nn.Sequential(nn.SELU(), nn.CELU(), nn.ELU(), nn.LogSigmoid())),
    "shrinks": (STEPS, nn.Sequential(nn.Tanhshrink(), nn.Softshrink(), nn.Softsign(), nn.ReLU6())),
    "softmaxes": (IMAGE, nn.Sequential(nn.Softmin(1), nn.Softmax2d(), nn.LogSoftmax(-1))),
    "lstm": (STEPS, Recurrent(nn.LSTM, num_layers=2, bidirectional=True)),
    "projected_lstm": (STEPS, Recurrent(nn.LSTM, proj_size=4)),
    "gru": (STEPS, Recurrent(nn.GRU, bidirectional=True)),
    "rnn": (STEPS, Recurrent(nn.RNN, nonlinearity="relu")),
    "lstm_cell": (STEPS, Cells(nn.LSTMCell)),
    "gru_cell": (STEPS, Cells(nn.GRUCell)),
    "attention": ((2, 5, 8), Attention()),
    "transformer": ((2, 5, 8), Translator()),
    "bilinear": ((2, 12), Pairs(nn.Bilinear(6, 6, 4))),
    "cosine": ((2, 12), Pairs(nn.CosineSimilarity(dim=-1))),
    "pairwise": ((2, 12), Pairs(nn.PairwiseDistance())),
    "losses": ((3, 12), Pairs(nn.SmoothL1Loss(reduction="none"))),
    "fold": ((2, 36, 100), nn.Fold((12, 12), 3)),
    "unfold": (IMAGE, nn.Unfold(3, dilation=2, padding=1, stride=2)),
    "shuffles": (IMAGE, nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2))),
    "channel_shuffle": (IMAGE, nn.ChannelShuffle(2)),
    "upsample": (IMAGE, nn.Upsample(scale_factor=1.5, mode="bilinear", align_corners=False)),
    "bicubic": (IMAGE, nn.Upsample(size=(7, 19), mode="bicubic")),
    "flatten": (IMAGE, nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (6, 24)))),
    "dropouts": (IMAGE, nn.Sequential(nn.Dropout2d(), nn.AlphaDropout(), nn.Dropout())),
}

size, inner = LAYERS[layer]
model = nn.Sequential(nn.Linear(size[-1], size[-1]), inner).eval().to(device)
results = {}
with torch.no_grad():
    start = time.perf_counter()
    results["first"] = model(torch.randn(size).to(device)).cpu()
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(2):
        results[f"answer{call}"] = model(torch.randn(size).to(device)).cpu()
    results["more"] = model(torch.randn(3, *size[1:]).to(device)).cpu()
torch.save(results, path)
