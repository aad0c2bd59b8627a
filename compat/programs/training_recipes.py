"""Trains small models in the ways of tutorials and papers: RECIPE."""

import copy
import io
import itertools
import sys
import warnings
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import functional_call
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

path, recipe = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
results = {}


def note(name, value):
    results[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def mlp(*sizes):
    layers = []
    for first, second in itertools.pairwise(sizes):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device)


def gan():
    generator, critic = mlp(4, 16, 8), mlp(8, 16, 1)
    optimizers = [optim.Adam(m.parameters(), 2e-3, betas=(0.5, 0.999)) for m in (generator, critic)]
    loss = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(8, 1, device=device), torch.zeros(8, 1, device=device)
    for _ in range(4):
        real = torch.randn(8, 8, device=device) + 2
        fake = generator(torch.randn(8, 4, device=device))
        optimizers[1].zero_grad()
        critics = loss(critic(real), ones) + loss(critic(fake.detach()), zeros)
        critics.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        makers = loss(critic(fake), ones)
        makers.backward()
        optimizers[0].step()
    note("losses", torch.stack([critics, makers]))
    note("samples", generator.eval()(torch.ones(2, 4, device=device)))


def gradient_penalty():
    critic = mlp(8, 16, 1)
    optimizer = optim.RMSprop(critic.parameters(), 1e-3)
    for _ in range(3):
        real, fake = torch.randn(2, 8, 8, device=device)
        mix = torch.rand(8, 1, device=device)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)


def variational():
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(16, 12, 8), mlp(4, 12, 16)

        def forward(self, x):
            mean, logvar = self.encoder(x).chunk(2, dim=-1)
            std = torch.exp(0.5 * logvar)
            return self.decoder(mean + torch.randn_like(std) * std), mean, logvar

    model = Vae().to(device)
    optimizer = optim.Adam(model.parameters(), 1e-2)
    for _ in range(4):
        x = torch.rand(8, 16, device=device)
        found, mean, logvar = model(x)
        loss = F.binary_cross_entropy_with_logits(found, x, reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)
    with torch.no_grad():
        note("again", model.eval()(x)[0])


def policy_gradient():
    policy = mlp(4, 16, 3)
    optimizer = optim.Adam(policy.parameters(), 1e-2)
    for _ in range(3):
        state, logs, rewards = torch.zeros(4), [], []
        for _ in range(5):
            chances = F.softmax(policy(state.to(device)), dim=-1)
            chosen = torch.distributions.Categorical(chances)
            action = chosen.sample()
            logs.append(chosen.log_prob(action))
            state = state + torch.randn(4) * (action.item() - 1)
            rewards.append(-float(state.abs().sum()))
        returns, total = deque(), 0.0
        for reward in reversed(rewards):
            total = reward + 0.9 * total
            returns.appendleft(total)
        returns = torch.tensor(returns, device=device)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(logs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)


def q_learning():
    online, target = mlp(4, 16, 2), mlp(4, 16, 2)
    target.load_state_dict(online.state_dict())
    optimizer = optim.AdamW(online.parameters(), 1e-2, amsgrad=True)
    memory = deque(maxlen=50)
    for step in range(30):
        state = torch.randn(1, 4, device=device)
        with torch.no_grad():
            action = online(state).max(1).indices.view(1, 1)
        memory.append((state, action, torch.randn(1, 4, device=device), torch.randn(1)))
        if step < 8 or step % 5:
            continue
        states, actions, after, rewards = zip(*list(memory)[-8:], strict=True)
        values = online(torch.cat(states)).gather(1, torch.cat(actions))
        with torch.no_grad():
            expected = torch.cat(rewards).to(device) + 0.9 * target(torch.cat(after)).amax(1)
        loss = F.smooth_l1_loss(values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 100)
        optimizer.step()
        state_dict = target.state_dict()
        for key, value in online.state_dict().items():
            state_dict[key] = value * 0.1 + state_dict[key] * 0.9
        target.load_state_dict(state_dict)
    note("loss", loss)
    note("values", target(torch.ones(1, 4, device=device)))


def contrastive():
    encoder = mlp(8, 16, 4)
    optimizer = optim.SGD(encoder.parameters(), 0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        views = torch.randn(6, 8, device=device).repeat(2, 1)
        found = F.normalize(encoder(views + 0.1 * torch.randn_like(views)), dim=1)
        likeness = found @ found.t() / 0.5
        likeness = likeness.masked_fill(torch.eye(12, dtype=torch.bool, device=device), -1e9)
        targets = torch.arange(12, device=device).roll(6)
        loss = F.cross_entropy(likeness, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)


def distillation():
    teacher, student = mlp(8, 32, 5).eval(), mlp(8, 8, 5)
    optimizer = optim.Adam(student.parameters(), 1e-2)
    for _ in range(4):
        x, y = torch.randn(8, 8, device=device), torch.randint(0, 5, (8,), device=device)
        with torch.inference_mode():
            wanted = F.softmax(teacher(x) / 2, -1)
        logits = student(x)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), wanted.clone(), reduction="batchmean") * 4
        loss = soft + F.cross_entropy(logits, y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)


def accumulated():
    model = mlp(8, 16, 3)
    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())
    optimizer = optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.01},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ],
        lr=0.1,
        momentum=0.9,
    )
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=4)
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x.to(device)), y.to(device)) / 2
        loss.backward()
        if number % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    note("norm", norm)
    note("rates", scheduler.get_last_lr())
    note("weight", model[2].weight)


def resumed():
    model = mlp(8, 16, 3)
    optimizer = optim.AdamW(model.parameters(), 1e-2, foreach=False)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    x, y = torch.randn(8, 8, device=device), torch.randint(0, 3, (8,), device=device)

    def step():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    step()
    file = io.BytesIO()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}, file)
    note("without", step())
    file.seek(0)
    kept = torch.load(file, map_location=device, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    scheduler.load_state_dict(kept["scheduler"])
    torch.set_rng_state(kept["rng"].cpu())
    note("resumed", step())
    assert torch.equal(results["without"], results["resumed"])
    note("moment", optimizer.state[model[0].weight]["exp_avg"])


def adversarial():
    model = mlp(8, 16, 3).eval()
    x = torch.randn(4, 8, device=device, requires_grad=True)
    loss = F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long, device=device))
    loss.backward()
    note("sign", model(x + 0.1 * x.grad.sign()))
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        F.cross_entropy(model(x.detach() + delta), torch.zeros(4).long().to(device)).backward()
        delta.data = (delta + 0.05 * delta.grad.detach().sign()).clamp(-0.2, 0.2)
        delta.grad.zero_()
    note("projected", delta)


def class_activation():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(8, 4)).to(device).eval()
    kept = {}
    net[1].register_forward_hook(lambda _, __, out: kept.update(activation=out))
    net[1].register_full_backward_hook(lambda _, __, out: kept.update(gradient=out[0]))
    logits = net(torch.randn(1, 3, 12, 12, device=device))
    net.zero_grad()
    logits[0, logits.argmax()].backward()
    weights = kept["gradient"].mean(dim=(2, 3), keepdim=True)
    note("map", F.relu((weights * kept["activation"]).sum(1)))


def adapted_quickly():
    model = mlp(4, 8, 1)
    outer = optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        total = 0
        for _ in range(2):
            x = torch.randn(5, 4, device=device)
            weights = dict(model.named_parameters())
            inner = functional_call(model, weights, (x,)).square().mean()
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
            total = total + functional_call(model, fast, (x,)).square().mean()
        outer.zero_grad()
        total.backward()
        outer.step()
    note("loss", total)


def differential_equation():
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    t = torch.linspace(0, 1, 8, device=device).unsqueeze(1).requires_grad_()

    def closure():
        optimizer.zero_grad()
        u = model(t)
        (du,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
        loss = (du + u).square().mean() + (model(t[:1]) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        loss = optimizer.step(closure)
    note("loss", loss)


def denoising():
    model = mlp(9, 32, 8)
    optimizer = optim.Adam(model.parameters(), 1e-3)
    betas = torch.linspace(1e-4, 0.02, 10, device=device)
    kept = torch.cumprod(1 - betas, 0)
    ema = optim.swa_utils.AveragedModel(
        model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for _ in range(3):
        x, noise = torch.randn(2, 6, 8, device=device)
        t = torch.randint(0, 10, (6,), device=device)
        noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
        loss = F.mse_loss(model(torch.cat([noisy, t[:, None] / 10], 1)), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
    note("loss", loss)
    sample = torch.randn(2, 8, device=device)
    with torch.no_grad():
        for t in reversed(range(10)):
            step = torch.full((2, 1), t / 10, device=device)
            guess = ema(torch.cat([sample, step], 1))
            sample = (sample - betas[t] / (1 - kept[t]).sqrt() * guess) / (1 - betas[t]).sqrt()
            if t:
                sample += betas[t].sqrt() * torch.randn_like(sample)
    note("sample", sample)


def connectionist():
    model = nn.LSTM(6, 8, bidirectional=True, batch_first=True).to(device)
    head = nn.Linear(16, 5).to(device)
    optimizer = optim.Adam([*model.parameters(), *head.parameters()], 1e-2)
    for _ in range(2):
        found, _ = model(torch.randn(3, 12, 6, device=device))
        logs = head(found).log_softmax(-1).transpose(0, 1)
        targets = torch.randint(1, 5, (3, 4), device=device)
        loss = F.ctc_loss(logs, targets, torch.full((3,), 12), torch.tensor([4, 3, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)


def checkpointed():
    model = nn.ModuleList(mlp(8, 8) for _ in range(3))
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        h = torch.randn(4, 8, device=device)
        for layer in model:
            h = h + checkpoint(layer, F.dropout(h, 0.1), use_reentrant=False)
        loss = h.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)


def early_stopped():
    model, best, kept = mlp(4, 8, 1), float("inf"), None
    optimizer = optim.NAdam(model.parameters(), 0.05)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    x = torch.randn(16, 4, device=device)
    for epoch in range(5):
        model.train()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found = (model(-x) + x.sum(1, keepdim=True)).abs().mean().item()
        plateau.step(found)
        if found < best:
            best, kept = found, copy.deepcopy(model.state_dict())
        note(f"epoch{epoch}", found)
    model.load_state_dict(kept)
    note("best", model(x))


globals()[recipe]()
torch.save(results, path)
