"""Calls functions of torch on a subject in a module: SUBJECT."""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

path, subject = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def decompositions(x):
    square = x @ x.mT + 3 * torch.eye(x.shape[-2], device=x.device)
    q, r = torch.linalg.qr(x)
    return [
        torch.linalg.cholesky(square),
        torch.linalg.eigvalsh(square),
        torch.linalg.svdvals(x),
        torch.linalg.inv(square),
        torch.linalg.slogdet(square)[1],
        q @ r,
    ]


def solving(x):
    square = x @ x.mT + 3 * torch.eye(x.shape[-2], device=x.device)
    return [
        torch.linalg.solve(square, x),
        torch.linalg.lstsq(square, x).solution,
        torch.linalg.matrix_exp(square / 20),
        torch.linalg.pinv(x),
        torch.linalg.matrix_norm(x, "nuc"),
        torch.linalg.multi_dot([x, x.mT, x]),
    ]


def spectra(x):
    whole = torch.fft.fft(x)
    return [
        whole.real,
        whole.imag,
        torch.fft.irfft(torch.fft.rfft(x), n=x.shape[-1]),
        torch.fft.fftshift(torch.fft.fft2(x)).abs(),
        torch.fft.fftfreq(8, device=x.device),
        torch.view_as_real(torch.fft.ihfft(x).resolve_conj()),
    ]


def short_spectra(x):
    window = torch.hann_window(16, device=x.device)
    sound = x.flatten().repeat(8)
    spectrum = torch.stft(sound, 16, 4, window=window, return_complex=True)
    back = torch.istft(spectrum, 16, 4, window=window, length=sound.numel())
    return [spectrum.abs(), spectrum.angle(), back]


def special_functions(x):
    positive = x.abs() + 0.5
    return [
        torch.special.gammaln(positive),
        torch.special.digamma(positive),
        torch.special.erfinv(torch.tanh(x)),
        torch.special.i0e(x),
        torch.special.xlog1py(positive, positive),
        torch.special.logsumexp(x, 0),
        torch.special.zeta(positive + 1, positive),
        torch.special.bessel_j0(x),
    ]


def sorting(x):
    values, order = torch.sort(x, dim=-1, descending=True, stable=True)
    distinct, counts = torch.unique((x * 2).round(), return_counts=True)
    return [
        values,
        order,
        distinct,
        counts,
        torch.kthvalue(x, 2).values,
        torch.median(x, dim=0).indices,
        torch.quantile(x, torch.tensor([0.1, 0.5], device=x.device), dim=1),
        torch.searchsorted(values.flip(-1).contiguous(), x),
        torch.bucketize(x, torch.linspace(-1, 1, 5, device=x.device)),
    ]


def counting(x):
    whole = (x * 3).round().long()
    return [
        torch.bincount((whole - whole.min()).flatten(), minlength=12),
        torch.histc(x, bins=6, min=-2, max=2),
        torch.cumsum(whole, 1),
        torch.cummax(x, 0).values,
        torch.logcumsumexp(x, 1),
        torch.diff(whole, dim=1),
        torch.count_nonzero(whole, dim=0),
    ]


def scattering(x):
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape) * 5 % x.shape[1]
    base = torch.zeros(x.shape[0], x.shape[1], device=x.device)
    return [
        base.scatter_add(1, index, x),
        base.scatter_reduce(1, index, x, "amax", include_self=False),
        torch.gather(x, 1, index),
        torch.take_along_dim(x, index, 1),
        base.index_add(1, index[0], x),
        base.index_copy(0, torch.tensor([1, 0], device=x.device), x[:2]),
        base.masked_scatter(x > 0, x),
        torch.index_select(x, 1, index[0]),
    ]


def indexing(x):
    rows = torch.tensor([2, 0], device=x.device)
    copied = x.clone()
    copied[rows, 1:3] = 7.0
    copied[copied < -1] = 0.0
    copied[..., -1] += x[..., 0]
    return [
        copied,
        x[rows],
        x[:, None, ::2],
        x[x > 0],
        torch.nonzero(x > 1),
        torch.where(x > 0, x, -x),
        x[torch.arange(3, device=x.device), torch.arange(3, device=x.device)],
    ]


def shapes(x):
    return [
        torch.stack([x, x]).movedim(0, -1),
        torch.cat([x, x], dim=1).unflatten(1, (2, -1)),
        x.unfold(1, 3, 2),
        torch.tril(x, 1),
        torch.block_diag(x, x),
        torch.cartesian_prod(x[0], x[1]),
        torch.combinations(x[0], 2),
        x.as_strided((2, 3), (1, 2)),
        torch.roll(x, 2, 1).rot90(),
        torch.repeat_interleave(x, 2, dim=0),
    ]


def scalars_first(x):
    one = x.sum()
    return [
        *torch.broadcast_tensors(one, x),
        *torch.meshgrid(one, x[0], indexing="ij"),
        torch.block_diag(one, x),
        torch.stack(torch.atleast_2d(one, one)),
        torch.cartesian_prod(one.reshape(1), x[0]),
    ]


def einsums(x):
    y = torch.einsum("ij,kj->ik", x, x)
    return [
        y,
        torch.einsum("ii->i", y),
        torch.einsum("bi,bj->bij", x, x),
        torch.tensordot(x, x, dims=([1], [1])),
        torch.kron(x[:2, :2], x[:2, :2]),
        torch.baddbmm(y.unsqueeze(0), x.unsqueeze(0), x.mT.unsqueeze(0), beta=0.5),
        torch.cdist(x, x),
        functional.pdist(x),
    ]


def complex_numbers(x):
    z = torch.complex(x, x.flip(0))
    return [
        (z * z.conj()).real,
        torch.polar(x.abs(), x).imag,
        torch.view_as_real(z.mT.contiguous()),
        z.angle(),
        torch.linalg.eigvals(x @ x.mT).real.sort().values,
        torch.resolve_conj(z.conj()),
    ]


def integers(x):
    whole = (x * 10).round().int()
    return [
        whole & 3,
        whole << 2,
        torch.bitwise_xor(whole, 5),
        torch.gcd(whole, torch.full_like(whole, 6)),
        torch.div(whole, 3, rounding_mode="floor"),
        torch.remainder(whole, -4),
        whole.to(torch.uint8),
        torch.isin(whole, torch.tensor([0, 5, 10], device=x.device)),
    ]


def sampling(x):
    grid = functional.affine_grid(torch.eye(2, 3, device=x.device)[None] * 0.7, (1, 1, 5, 5))
    return [
        functional.grid_sample(x[None, None], grid, align_corners=False),
        functional.interpolate(x[None, None], scale_factor=2, mode="nearest"),
        functional.interpolate(x[None], size=5, mode="linear"),
        functional.pad(x, (1, 2), value=3.0),
        functional.one_hot((x > 0).long(), 3),
        functional.pixel_shuffle(x[:, :4].reshape(1, 4, -1, 1), 2),
    ]


def attention(x):
    heads = x.reshape(1, 1, *x.shape)
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).tril()
    attend = functional.scaled_dot_product_attention
    return [
        attend(heads, heads, heads),
        attend(heads, heads, heads, attn_mask=mask),
        attend(heads, heads, heads, is_causal=True, scale=0.3),
        attend(heads.repeat(1, 4, 1, 1), heads, heads, enable_gqa=True),
    ]


def losses(x):
    target = torch.arange(x.shape[0], device=x.device) % x.shape[1]
    return [
        functional.cross_entropy(x, target, label_smoothing=0.1),
        functional.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
        functional.binary_cross_entropy_with_logits(x, (x > 0).float()),
        functional.huber_loss(x, -x),
        functional.multi_margin_loss(x, target),
        functional.triplet_margin_loss(x, x.flip(0), x.roll(1)),
        functional.gaussian_nll_loss(x, -x, x.abs() + 1),
        functional.poisson_nll_loss(x, x.abs()),
    ]


def reductions(x):
    return [
        torch.std_mean(x, 1)[0],
        torch.var(x, unbiased=False),
        torch.aminmax(x, dim=1).max,
        x.nansum(),
        torch.logsumexp(x, (0, 1)),
        x.norm(3, dim=0),
        torch.cov(x),
        torch.corrcoef(x),
        torch.trapezoid(x, dim=1),
        x.prod(1),
        torch.all(x > -9, dim=1),
    ]


class Subject(nn.Module):
    """A layer, then the functions of the subject on what it gives."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x):
        return globals()[subject](self.layer(x))


model = Subject().eval().to(device)
results = {}
with torch.no_grad():
    start = time.perf_counter()
    results["first"] = [part.cpu() for part in model(torch.randn(5, 6).to(device))]
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(2):
        answer = model(torch.randn(5, 6).to(device))
        results[f"answer{call}"] = [part.cpu() for part in answer]
torch.save(results, path)
