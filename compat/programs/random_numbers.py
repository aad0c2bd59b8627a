"""Random numbers on the device: seeds, generators, distributions, saved and forked states."""

import sys

import torch
from torch import nn

path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
results = {}


class Noisy(nn.Module):
    def forward(self, x):
        kept = torch.bernoulli(torch.full_like(x, 0.5))
        return x * kept + torch.randn_like(x) + torch.rand(1, device=x.device)


torch.manual_seed(3)
model = Noisy().to(device)
x = torch.zeros(2, 4, device=device)
for call in range(3):
    results[f"noise{call}"] = model(x).cpu()
torch.manual_seed(3)
results["again"] = torch.equal(model(x).cpu(), results["noise0"])
with torch.random.fork_rng():
    torch.manual_seed(99)
    results["forked"] = model(x).cpu()
results["continued"] = torch.equal(model(x).cpu(), results["noise1"])
generator = torch.Generator(device=device).manual_seed(5)
results["normal"] = torch.randn(3, generator=generator, device=device).cpu()
results["integers"] = torch.randint(0, 9, (5,), generator=generator, device=device).cpu()
results["order"] = torch.randperm(6, generator=generator, device=device).cpu()
results["drawn"] = torch.multinomial(torch.ones(5, device=device), 3, generator=generator).cpu()
filled = torch.empty(2, 2, device=device)
results["uniform"] = filled.uniform_(-1, 1, generator=generator).clone().cpu()
results["normal_"] = nn.init.kaiming_normal_(filled, generator=generator).cpu()
distribution = torch.distributions.Normal(torch.zeros(2, device=device), 1.0)
torch.manual_seed(4)
results["distribution"] = distribution.sample((2,)).cpu()
results["likelihood"] = distribution.log_prob(torch.ones(2, device=device)).cpu()
results["category"] = (
    torch.distributions.Categorical(logits=torch.ones(4, device=device)).sample((5,)).tolist()
)
torch.save(results, path)
