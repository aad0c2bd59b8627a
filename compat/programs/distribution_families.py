"""A model that gives the parameters of a distribution, and what that says: FAMILY."""

import sys

import torch
from torch import distributions as D
from torch import nn

path, family = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
FAMILIES = {
    "Normal": lambda a, b: D.Normal(a, b.exp()),
    "LogNormal": lambda a, b: D.LogNormal(a, b.exp()),
    "Gamma": lambda a, b: D.Gamma(a.exp(), b.exp()),
    "Beta": lambda a, b: D.Beta(a.exp(), b.exp()),
    "Laplace": lambda a, b: D.Laplace(a, b.exp()),
    "StudentT": lambda a, b: D.StudentT(a.exp() + 3, a, b.exp()),
    "Gumbel": lambda a, b: D.Gumbel(a, b.exp()),
    "Categorical": lambda a, b: D.Categorical(logits=a),
    "Bernoulli": lambda a, b: D.Bernoulli(logits=a),
    "Poisson": lambda a, b: D.Poisson(a.exp()),
    "Dirichlet": lambda a, b: D.Dirichlet(a.exp()),
    "MultivariateNormal": lambda a, b: D.MultivariateNormal(a, torch.diag_embed(b.exp())),
    "Mixture": lambda a, b: D.MixtureSameFamily(D.Categorical(logits=a), D.Normal(a, b.exp())),
    "Transformed": lambda a, b: D.TransformedDistribution(
        D.Normal(a, b.exp()), [D.transforms.TanhTransform()]
    ),
    "Independent": lambda a, b: D.Independent(D.Normal(a, b.exp()), 1),
    "Weibull": lambda a, b: D.Weibull(a.exp(), b.exp()),
}


class Head(nn.Module):
    """Two numbers an outcome."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x):
        return self.layer(x).mul(0.3).chunk(2, dim=-1)


model = Head().to(device).eval()
results = {}
with torch.no_grad():
    for call in range(2):
        a, b = model(torch.randn(3, 6).to(device))
        found = FAMILIES[family](a, b)
        drawn = found.sample()
        results[f"drawn{call}"] = drawn.cpu()
        results[f"likely{call}"] = found.log_prob(drawn).cpu()
        results[f"many{call}"] = found.sample((3,)).cpu()
    scalar = D.Normal(torch.tensor(0.5, device=device), torch.ones(3, device=device))
    results["scalar"] = scalar.log_prob(torch.zeros(3, device=device)).cpu()
torch.save(results, path)
