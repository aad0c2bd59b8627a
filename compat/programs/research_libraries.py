"""Uses a library of researchers around a small model: SUBJECT."""

import logging
import sys
import warnings

import einops
import pyro
import pytorch_lightning
import torch
import torchmetrics
from einops.layers.torch import Rearrange, Reduce
from pyro import distributions
from pyro.infer import SVI, Predictive, Trace_ELBO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

path, subject = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
warnings.simplefilter("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Classifier(pytorch_lightning.LightningModule):
    """Lightning's form of the model."""

    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def predict_step(self, batch, _):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer():
    accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    return pytorch_lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def data():
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(12, 6), torch.arange(12) % 3), batch_size=4)


def lightning_predict():
    return torch.cat([part.cpu() for part in trainer().predict(Classifier(), data())])


def lightning_fit():
    model = Classifier()
    trainer().fit(model, data())
    return torch.cat([weight.detach().cpu().flatten() for weight in model.parameters()])


def classification_metrics():
    model = net.to(device).eval()
    kinds = {"num_classes": 3}
    metrics = torchmetrics.MetricCollection(
        [
            torchmetrics.classification.MulticlassAccuracy(**kinds),
            torchmetrics.classification.MulticlassF1Score(**kinds),
            torchmetrics.classification.MulticlassAUROC(**kinds),
            torchmetrics.classification.MulticlassConfusionMatrix(**kinds),
        ]
    ).to(device)
    with torch.no_grad():
        for x, y in data():
            metrics.update(model(x.to(device)).softmax(-1), y.to(device))
    return {name: value.cpu() for name, value in metrics.compute().items()}


def regression_metrics():
    metrics = torchmetrics.MetricCollection(
        [
            torchmetrics.MeanSquaredError(),
            torchmetrics.PearsonCorrCoef(),
            torchmetrics.R2Score(),
            torchmetrics.SpearmanCorrCoef(),
        ]
    ).to(device)
    model = net.to(device).eval()
    with torch.no_grad():
        for x, _ in data():
            metrics.update(model(x.to(device))[:, 0], x.to(device)[:, 0])
    return {name: value.cpu() for name, value in metrics.compute().items()}


def picture_metrics():
    found = [
        torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0),
        torchmetrics.image.StructuralSimilarityIndexMeasure(data_range=1.0),
        torchmetrics.image.TotalVariation(),
    ]
    one, other = torch.rand(2, 3, 24, 24).to(device), torch.rand(2, 3, 24, 24).to(device)
    both = [metric.to(device)(one, other).cpu() for metric in found[:2]]
    return [*both, found[2].to(device)(one).cpu()]


def rearranged():
    model = nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4),
        nn.Linear(48, 8),
        Reduce("b n d -> b d", "mean"),
    )
    model = model.to(device).eval()
    with torch.no_grad():
        found = model(torch.rand(2, 3, 16, 16).to(device))
    return einops.repeat(found, "b d -> b n d", n=2).cpu()


def variational():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    x = torch.randn(20).to(device)

    def model():
        mean = pyro.sample("mean", distributions.Normal(torch.zeros((), device=device), 5.0))
        with pyro.plate("data", 20):
            pyro.sample("seen", distributions.Normal(mean, 1.0), obs=x)

    def guide():
        at = pyro.param("at", torch.zeros((), device=device))
        pyro.sample("mean", distributions.Normal(at, 0.3))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step() for _ in range(5)]
    return {"losses": losses, "at": pyro.param("at").detach().cpu()}


def predictive():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    moved = net.to(device)

    def model(x):
        scores = moved(x)
        with pyro.plate("rows", x.shape[0]):
            return pyro.sample("kind", distributions.Categorical(logits=scores))

    with torch.no_grad():
        found = Predictive(model, num_samples=4)(torch.randn(5, 6).to(device))
    return found["kind"].cpu()


torch.save({"found": globals()[subject]()}, path)
