"""Computes with tensors alone what people compute on GPUs without a model: RECIPE."""

import sys
import warnings

import numpy as np
import torch
import torch.nn.functional as F

path, recipe = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
results = {}


def note(name, value):
    results[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def points(*shape):
    return torch.randn(*shape).to(device)


def clusters():
    data = torch.cat([points(20, 3) + shift for shift in (0, 5, -5)])
    centres = data[[0, 25, 50]].clone()
    for _ in range(5):
        nearest = torch.cdist(data, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, data)
        centres = sums / torch.bincount(nearest, minlength=3).clamp(min=1)[:, None]
    note("centres", centres)
    note("nearest", nearest)
    one_hot = F.one_hot(nearest, 3).float()
    note("again", one_hot.T @ data / one_hot.sum(0)[:, None])


def components():
    data = points(30, 6)
    data = data - data.mean(0)
    _, values, vectors = torch.linalg.svd(data, full_matrices=False)
    note("values", values)
    note("projected", (data @ vectors[:2].T).abs())
    note("covariance", torch.cov(data.T))
    note("eigen", torch.linalg.eigvalsh(data.T @ data))
    u, s, v = torch.pca_lowrank(data, q=6, niter=4)
    note("low_rank", (u * s) @ v.T)
    note("fit", torch.linalg.lstsq(data, data[:, :1]).solution)


def mandelbrot():
    real, imaginary = torch.linspace(-2, 1, 12), torch.linspace(-1, 1, 9)
    c = torch.complex(*torch.meshgrid(real, imaginary, indexing="xy")).to(device)
    z, counts = torch.zeros_like(c), torch.zeros(c.shape, device=device)
    for _ in range(10):
        z = z**2 + c
        counts += z.abs() < 2
    note("counts", counts)


def random_walks():
    steps = torch.randint(0, 2, (50, 20), device=device) * 2 - 1
    walks = steps.cumsum(1)
    note("ends", walks[:, -1].float().mean())
    note("highest", walks.cummax(1).values[:, -1])
    note("histogram", torch.histc(walks.float(), bins=8, min=-20, max=20))
    note("quantiles", torch.quantile(walks.float(), torch.tensor([0.1, 0.5, 0.9], device=device)))


def game_of_life():
    board = (torch.rand(1, 1, 16, 16) > 0.6).float().to(device)
    kernel = torch.ones(1, 1, 3, 3, device=device)
    kernel[0, 0, 1, 1] = 0
    for _ in range(5):
        near = F.conv2d(F.pad(board, (1, 1, 1, 1), mode="circular"), kernel)
        board = ((near == 3) | ((board == 1) & (near == 2))).float()
    note("board", board)


def pictures_filtered():
    picture = torch.rand(1, 3, 20, 20).to(device)
    grey = (picture * torch.tensor([0.3, 0.6, 0.1], device=device).view(1, 3, 1, 1)).sum(1, True)
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], device=device)[None, None]
    across, down = (F.conv2d(grey, k, padding=1) for k in (sobel, sobel.transpose(2, 3)))
    note("edges", torch.hypot(across, down))
    note("angle", torch.atan2(down, across + 1e-3))
    patches = F.unfold(picture, 5, stride=5)
    note("fold", F.fold(patches, (20, 20), 5, stride=5))
    note("median", picture.unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2).median(-1).values)
    turned = F.affine_grid(torch.tensor([[[0.8, -0.6, 0], [0.6, 0.8, 0]]]).to(device), (1, 3, 9, 9))
    note("turned", F.grid_sample(picture, turned, align_corners=False, padding_mode="border"))


def sounds():
    t = torch.arange(0, 1, 1 / 800).to(device)
    wave = torch.sin(2 * torch.pi * 50 * t) + 0.5 * torch.sin(2 * torch.pi * 120 * t)
    window = torch.hann_window(64, device=device)
    spectrum = torch.stft(wave, 64, 16, window=window, return_complex=True)
    note("power", spectrum.abs().pow(2).clamp(min=1e-10).log10())
    note("back", torch.istft(spectrum, 64, 16, window=window, length=800))
    note("peak", torch.fft.rfft(wave).abs().argmax())
    note("frequencies", torch.fft.rfftfreq(800, 1 / 800, device=device)[:5])
    note("real", spectrum.real.sum() + spectrum.imag.sum() + torch.view_as_real(spectrum).sum())
    note("convolved", torch.fft.irfft(torch.fft.rfft(wave) * torch.fft.rfft(wave, 800), 800))
    note("phase", torch.polar(spectrum.abs(), spectrum.angle()).imag)


def heat():
    plate = torch.zeros(20, 20, device=device)
    plate[0] = 100
    plate[:, 0], plate[-1, 5:10] = 50, -20.0
    for _ in range(20):
        new = plate.clone()
        new[1:-1, 1:-1] = (
            plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
        ) / 4
        plate = new
    note("plate", plate)


def bodies():
    places, speeds, masses = points(8, 3), torch.zeros(8, 3, device=device), points(8).abs()
    for _ in range(5):
        apart = places[None] - places[:, None]
        cubes = (apart.square().sum(-1) + 0.1) ** -1.5
        speeds += 0.01 * (apart * (masses[None, :, None] * cubes[..., None])).sum(1)
        places += 0.01 * speeds
    note("places", places)


def ranked_documents():
    counts = torch.randint(0, 4, (6, 12)).float().to(device)
    frequency = (counts > 0).sum(0)
    weights = counts / counts.sum(1, keepdim=True) * torch.log(6 / (1 + frequency))
    found = F.cosine_similarity(weights[:1], weights, dim=-1)
    top = found.topk(3)
    note("values", top.values)
    note("order", torch.argsort(found, descending=True, stable=True))
    links = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0.0]], device=device)
    rank = torch.full((4,), 0.25, device=device)
    for _ in range(10):
        rank = 0.15 / 4 + 0.85 * (links / links.sum(1, keepdim=True)).T @ rank
    note("rank", rank)
    note("sparse", torch.sparse.mm(links.to_sparse(), rank[:, None]))


def grouped_sums():
    keys, values = torch.randint(0, 5, (30,)).to(device), points(30)
    unique, inverse, counts = keys.unique(return_inverse=True, return_counts=True)
    note("unique", unique)
    note("counts", counts)
    for how in ("sum", "mean", "amax", "amin", "prod"):
        start = torch.ones(5, device=device)
        note(how, start.scatter_reduce(0, inverse, values, reduce=how, include_self=False))
    note("added", torch.zeros(5, device=device).scatter_add_(0, keys, values))
    lengths = torch.tensor([10, 5, 15], device=device)
    note("segments", torch.segment_reduce(values, "max", lengths=lengths))
    note("consecutive", torch.unique_consecutive(keys.sort().values))
    note("repeated", torch.repeat_interleave(torch.arange(3, device=device), lengths))
    note("bucket", torch.bucketize(values, torch.linspace(-2, 2, 5, device=device)))
    note("where", torch.where(values > 0)[0])
    note("masked", values[values > 0].sum() + values.masked_select(values < 0).sum())
    note("nonzero", (keys == 2).nonzero().squeeze(1))


def monte_carlo():
    generator = torch.Generator(device=device).manual_seed(3)
    darts = torch.rand(1000, 2, generator=generator, device=device)
    note("pi", 4 * (darts.square().sum(1) <= 1).float().mean())
    price = 100 * torch.exp(torch.randn(500, generator=generator, device=device) * 0.2 - 0.02)
    note("option", torch.relu(price - 105).mean())
    note("draws", torch.multinomial(torch.ones(5, device=device), 20, True, generator=generator))
    note("coins", torch.bernoulli(torch.full((9,), 0.3, device=device), generator=generator))
    note("shuffled", torch.randperm(8, device=device, generator=generator))
    note("normal", torch.normal(torch.zeros(3, device=device), 2.0, generator=generator))


def linear_systems():
    a = points(4, 4)
    a = a @ a.T + 4 * torch.eye(4, device=device)
    b = points(4, 2)
    note("solved", torch.linalg.solve(a, b))
    lower = torch.linalg.cholesky(a)
    note("cholesky", torch.cholesky_solve(b, lower))
    note("triangular", torch.linalg.solve_triangular(lower, b, upper=False))
    note("inverse", torch.inverse(a) + torch.linalg.pinv(a))
    note("determinant", torch.linalg.slogdet(a).logabsdet + a.det().log() + a.logdet())
    q, r = torch.linalg.qr(a)
    note("product", q @ r)
    note("power", torch.linalg.matrix_power(a, 3) + torch.matrix_exp(a / 10))
    note("norms", torch.stack([torch.linalg.norm(a, p) for p in (1, 2, float("inf"), "nuc")]))
    note("eigen", torch.linalg.eig(a).eigenvalues.real.sort().values)
    lu, pivots = torch.linalg.lu_factor(a)
    note("factored", torch.linalg.lu_solve(lu, pivots, b))
    note("rank", torch.linalg.matrix_rank(a))
    note("trace", torch.einsum("ii", a) + torch.trace(a) + torch.kron(a, a).sum())


def with_numpy():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = torch.from_numpy(array).to(device)
    note("product", given @ given.T)
    note("scaled", given * np.float32(2) + np.sqrt(3.0) - np.int64(1))
    note("reverse", torch.tensor(np.float64(2.5), device=device) * given)
    note("index", given[np.array([0, 2])] + given[:, np.int64(1)][0])
    note("numpy", torch.from_numpy(np.asarray(given.cpu()) + 1))
    note("round", round(float(given.mean()), 3))
    note("maximum", np.max([given[0, 0].item(), given[2, 3].item()]).item())
    note("shape", torch.zeros(tuple(np.array([2, 3])), device=device))
    note("list", torch.tensor([given[0, 0], given[0, 1]], device=device))
    note("mask", given[torch.from_numpy(array > 5).to(device)])


def in_place():
    given = points(4, 5)
    given[given < 0] = 0
    given[1] += 2
    given[:, -1:] *= 3
    given[..., 0].clamp_(max=0.5)
    given[torch.arange(4), torch.tensor([0, 1, 2, 3])] = -1
    given.index_fill_(1, torch.tensor([2], device=device), 9.0)
    given.masked_fill_(given > 5, 5.0)
    given.t_().add_(1).transpose_(0, 1)
    given.fill_diagonal_(0.25)
    a, b = given.split([2, 3], dim=1)
    a.zero_()
    b.copy_(torch.ones(3, device=device))
    given.view(-1)[::3] = 7
    torch.add(given, 1, out=given)
    given.index_put_((torch.tensor([0, 0]).to(device),), torch.tensor(1.0, device=device), True)
    note("given", given)
    note("swapped", torch.swapaxes(given, 0, 1).contiguous().mul_(2))
    given.resize_(2, 3)
    note("resized", given)


def integers():
    given = torch.randint(-100, 100, (20,), dtype=torch.int32).to(device)
    note("floor", given // 7)
    note("remainder", given % 7 + given.fmod(5))
    note("bits", (given & 15) | (given << 2) ^ (given >> 1))
    note("bytes", (given.to(torch.uint8) + 200).to(torch.int64))
    note("float", given.float() / 3 - given.half().float())
    note("gcd", torch.gcd(given, torch.tensor(12, dtype=torch.int32, device=device)))
    note("sum", given.sum() + given.bool().sum())
    note("kth", given.kthvalue(4).values)
    note("mode", (given % 3).mode().values)
    note("combinations", torch.combinations(given[:4], 2))
    note("product", torch.cartesian_prod(given[:2], given[2:4]))
    note("rolled", given.roll(3).flip(0).diff())
    note("float8", given.float().to(torch.float8_e4m3fn).float())


globals()[recipe]()
torch.save(results, path)
