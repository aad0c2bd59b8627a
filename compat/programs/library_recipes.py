"""Follows the first pages of libraries around torch: PAGE."""

import sys
import tempfile
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

path, page = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
np.random.seed(0)
warnings.simplefilter("ignore")
results = {}


def note(name, value):
    results[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def timm_features():
    import timm
    from timm.utils import ModelEmaV3

    x = torch.rand(2, 3, 64, 64).to(device)
    net = timm.create_model("resnet18", features_only=True, out_indices=(1, 3)).to(device).eval()
    with torch.no_grad():
        for level, found in enumerate(net(x)):
            note(f"level{level}", found)
    net = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, drop_path_rate=0.1)
    net = net.to(device).eval()
    ema = ModelEmaV3(net, decay=0.9)
    with torch.inference_mode():
        note("features", net.forward_features(x))
        note("pooled", net.forward_head(net.forward_features(x), pre_logits=True))
        note("ema", ema.module(x))
        net.reset_classifier(0)
        note("headless", net(x))
        note("middle", net.forward_intermediates(x, indices=2, intermediates_only=True)[0])


def timm_training():
    import timm
    from timm.data import Mixup
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    net = timm.create_model("mobilenetv3_small_050", num_classes=4).to(device)
    optimizer = create_optimizer_v2(net, opt="lamb", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=4, warmup_t=1)
    mix = Mixup(mixup_alpha=0.2, cutmix_alpha=0.5, num_classes=4)
    for epoch in range(2):
        x, y = torch.rand(4, 3, 32, 32).to(device), torch.arange(4).to(device)
        x, y = mix(x, y)
        loss = SoftTargetCrossEntropy()(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(epoch + 1)
    note("loss", loss)
    note("smooth", LabelSmoothingCrossEntropy()(net.eval()(x), torch.arange(4).to(device)))


def lightning_module():
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

    class Model(pl.LightningModule):
        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch, index):
            return self(batch[0]).argmax(-1)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="auto",
            devices=1,
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            callbacks=[EarlyStopping("val_loss"), ModelCheckpoint(folder, monitor="val_loss")],
        )
        model = Model()
        trainer.fit(model, DataLoader(data, 4), DataLoader(data, 8))
        note(
            "validated", trainer.validate(model, DataLoader(data, 8), verbose=False)[0]["val_loss"]
        )
        note("predicted", torch.cat(trainer.predict(model, DataLoader(data, 8))))
        again = Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    note("loaded", again.to(device).eval()(torch.ones(2, 4, device=device)))


def fabric():
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cuda" if device == "cuda" else "cpu", devices=1)
    fabric.launch()
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(8, 4)), 4))
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    note("loss", loss)


def metrics():
    import torchmetrics
    from torchmetrics import MetricCollection, classification, image, regression

    found = MetricCollection(
        [
            classification.MulticlassAccuracy(4),
            classification.MulticlassF1Score(4, average="macro"),
            classification.MulticlassConfusionMatrix(4),
            classification.MulticlassAUROC(4),
        ]
    ).to(device)
    for _ in range(3):
        found.update(torch.rand(10, 4).softmax(-1).to(device), torch.arange(10).to(device) % 4)
    for name, value in found.compute().items():
        note(name, value)
    psnr = image.PeakSignalNoiseRatio(data_range=1.0).to(device)
    note("psnr", psnr(torch.rand(1, 3, 16, 16).to(device), torch.rand(1, 3, 16, 16).to(device)))
    note(
        "pearson",
        regression.PearsonCorrCoef().to(device)(torch.rand(9).to(device), torch.rand(9).to(device)),
    )
    mean = torchmetrics.MeanMetric().to(device)
    mean(torch.tensor(3.0, device=device))
    note("mean", mean(5))
    note(
        "retrieval",
        torchmetrics.retrieval.RetrievalMAP()(
            torch.rand(6).to(device),
            torch.tensor([1, 0, 1, 0, 1, 1]).bool().to(device),
            indexes=torch.tensor([0, 0, 0, 1, 1, 1]).to(device),
        ),
    )


def rearranging():
    from einops import einsum, pack, rearrange, reduce, repeat, unpack
    from einops.layers.torch import EinMix, Rearrange, Reduce

    net = (
        nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4),
            nn.Linear(48, 16),
            EinMix("b n d -> b n (h e)", weight_shape="d h e", d=16, h=2, e=8),
            Reduce("b n d -> b d", "mean"),
        )
        .to(device)
        .eval()
    )
    x = torch.rand(2, 3, 16, 16).to(device)
    with torch.no_grad():
        note("net", net(x))
    note("max", reduce(x, "b c h w -> b c", "max"))
    note("tiled", repeat(x[:, :, 0, 0], "b c -> b (c n)", n=3))
    note("swapped", rearrange(list(x), "b c h w -> h w (b c)"))
    note("product", einsum(x, x, "b c h w, b d h w -> c d"))
    packed, shapes = pack([x, x[:, :1]], "b * h w")
    note("packed", packed + sum(part.sum() for part in unpack(packed, shapes, "b * h w")))


def diffusion_pipeline():
    from diffusers import DDIMScheduler, DDPMPipeline, DPMSolverMultistepScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    for scheduler in (DDIMScheduler(), DPMSolverMultistepScheduler()):
        pipe = DDPMPipeline(unet, scheduler).to(device)
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator("cpu").manual_seed(0)
        found = pipe(2, generator=generator, num_inference_steps=3, output_type="np").images
        note(type(scheduler).__name__, torch.from_numpy(found))


def diffusion_training():
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    net = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    ).to(device)
    noises, ema = DDPMScheduler(50), EMAModel(net.parameters(), decay=0.9)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 4)
    for _ in range(2):
        x, noise = torch.randn(2, 2, 1, 8, 8).to(device)
        steps = torch.randint(0, 50, (2,), device=device)
        loss = F.mse_loss(net(noises.add_noise(x, noise, steps), steps).sample, noise)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.step(net.parameters())
    ema.copy_to(net.parameters())
    note("loss", loss)
    note("weight", net.conv_in.weight)


def several_adapters():
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=4, **options), "one")
    model.add_adapter("two", peft.LoraConfig(r=2, **options))
    model = model.to(device).eval()
    ids = torch.randint(0, 64, (2, 6)).to(device)
    with torch.no_grad():
        for name in ("one", "two", "one"):
            model.set_adapter(name)
            note(f"{name}{len(results)}", model(ids).logits)
        model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "both", combination_type="cat")
        model.set_adapter("both")
        note("both", model(ids).logits)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            base = LlamaForCausalLM(config)
            base.load_state_dict(model.get_base_model().state_dict(), strict=False)
            again = peft.PeftModel.from_pretrained(base, f"{folder}/two").to(device).eval()
            note("again", again(ids).logits.isfinite().all())
        model.delete_adapter("two")
        note("merged", model.merge_and_unload()(ids).logits)


def augmented_pictures():
    import kornia.augmentation as K
    import kornia.geometry as G

    x = torch.rand(2, 3, 24, 24).to(device)
    steps = K.AugmentationSequential(
        K.RandomHorizontalFlip(p=0.5),
        K.RandomAffine(15.0, p=1.0),
        K.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=1.0),
        K.RandomGaussianBlur((3, 3), (0.5, 1.0), p=1.0),
        data_keys=["input", "mask"],
    ).to(device)
    image, mask = steps(x, (x[:, :1] > 0.5).float())
    note("image", image)
    note("mask", mask)
    note("rotated", G.rotate(x, torch.tensor([30.0, 60.0], device=device)))
    note("resized", G.resize(x, (12, 12)))
    points = torch.tensor([[[1.0, 1], [20, 2], [20, 20], [2, 19]]], device=device)
    note("homography", G.get_perspective_transform(points, points + 2))
    note("depth", G.depth_to_3d_v2(x[:, 0], torch.eye(3, device=device).expand(2, 3, 3)))


def probabilities():
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    x = torch.linspace(-1, 1, 12).to(device)
    y = 2 * x + 0.3

    class Line(PyroModule):
        def __init__(self):
            super().__init__()
            zero, one = torch.tensor(0.0, device=device), torch.tensor(1.0, device=device)
            self.slope = PyroSample(dist.Normal(zero, one))
            self.start = PyroSample(dist.Normal(zero, one))

        def forward(self, x, y=None):
            mean = self.slope * x + self.start
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    model = Line()
    guide = AutoNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    for _ in range(5):
        loss = svi.step(x, y)
    note("loss", loss)
    note("median", guide.median(x)["slope"])


def graphs():
    from torch_geometric.data import Batch, Data, HeteroData
    from torch_geometric.nn import (
        GAT,
        GCN,
        GCNConv,
        GraphNorm,
        HeteroConv,
        SAGEConv,
        global_mean_pool,
    )
    from torch_geometric.utils import dropout_edge, softmax, to_undirected

    edges = to_undirected(torch.randint(0, 8, (2, 14)))
    batch = Batch.from_data_list(
        [Data(x=torch.randn(8, 6), edge_index=edges) for _ in range(3)]
    ).to(device)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = GCNConv(6, 8), GraphNorm(8), GCNConv(8, 4)

        def forward(self, x, edge_index, batch):
            x = self.norm(self.first(x, edge_index), batch).relu()
            x = F.dropout(x, 0.5, self.training)
            return global_mean_pool(self.second(x, edge_index), batch)

    with torch.no_grad():
        note("classes", Classifier().to(device).eval()(batch.x, batch.edge_index, batch.batch))
        for kind in (GCN, GAT):
            net = kind(6, 8, num_layers=2, out_channels=3).to(device).eval()
            note(kind.__name__, net(batch.x, batch.edge_index))
        mixed = HeteroData()
        mixed["user"].x, mixed["item"].x = torch.randn(4, 6), torch.randn(5, 3)
        mixed["user", "buys", "item"].edge_index = torch.tensor([[0, 1, 2, 3], [0, 2, 4, 1]])
        mixed = mixed.to(device)
        net = HeteroConv({("user", "buys", "item"): SAGEConv((6, 3), 4)}).to(device).eval()
        note("mixed", net(mixed.x_dict, mixed.edge_index_dict)["item"])
    note("softmax", softmax(torch.randn(6).to(device), torch.tensor([0, 0, 1, 1, 1, 2]).to(device)))
    note("dropped", dropout_edge(batch.edge_index, 0.0)[0])


globals()[page]()
torch.save(results, path)
