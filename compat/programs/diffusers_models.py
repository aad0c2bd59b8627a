"""Denoises or decodes with a small model of diffusers: MODEL."""

import sys
import time

import diffusers
import torch

path, name = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
BLOCKS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
ATTENDING = {"cross_attention_dim": 16, "attention_head_dim": 8}


def noisy():
    return torch.randn(1, 4, 8, 8).to(device)


def words(width=16):
    return torch.randn(1, 5, width).to(device)


def when():
    return torch.tensor([37]).to(device)


def unet_condition():
    model = diffusers.UNet2DConditionModel(sample_size=8, **BLOCKS, **ATTENDING)
    return model, lambda m: m(noisy(), when(), words()).sample


def unet_plain():
    model = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    return model, lambda m: m(noisy(), when()).sample


def controlnet():
    model = diffusers.ControlNetModel(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        conditioning_embedding_out_channels=(8, 16),
        **ATTENDING,
    )
    picture = torch.rand(1, 3, 16, 16).to(device)
    return model, lambda m: m(noisy(), when(), words(), picture).mid_block_res_sample


def autoencoder():
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )
    picture = torch.rand(1, 3, 16, 16).to(device)
    return model, lambda m: m.decode(m.encode(picture).latent_dist.mode()).sample


def tiny_autoencoder():
    model = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    return model, lambda m: m(torch.rand(1, 3, 16, 16).to(device)).sample


def quantized_autoencoder():
    model = diffusers.VQModel(
        block_out_channels=(16,),
        norm_num_groups=8,
        num_vq_embeddings=16,
        latent_channels=4,
    )
    return model, lambda m: m(torch.rand(1, 3, 16, 16).to(device)).sample


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=8,
    )
    label = torch.tensor([3]).to(device)
    return model, lambda m: m(noisy(), when(), label).sample


def stable_diffusion_3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
    )
    return model, lambda m: m(noisy(), words(), words()[:, 0], when()).sample


def flux():
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    picture, places = torch.randn(1, 16, 4).to(device), torch.zeros(16, 3).to(device)
    given = {"img_ids": places, "txt_ids": torch.zeros(5, 3).to(device)}
    return model, lambda m: m(picture, words(), words()[:, 0], when() / 1000, **given).sample


def pixart():
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        norm_num_groups=8,
        use_additional_conditions=False,
    )
    conditions = {"resolution": None, "aspect_ratio": None}
    return (
        model,
        lambda m: m(noisy(), words(), timestep=when(), added_cond_kwargs=conditions).sample,
    )


def prior():
    model = diffusers.PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=5,
        additional_embeddings=4,
    )
    return (
        model,
        lambda m: m(words()[:, 0], when(), words()[:, 0], words()).predicted_image_embedding,
    )


def sampling_loop():
    model = unet_condition()[0]
    scheduler = diffusers.DDIMScheduler()

    def sample(m):
        scheduler.set_timesteps(3)
        latents = torch.randn(1, 4, 8, 8).to(device)
        for step in scheduler.timesteps:
            predicted = m(latents, step.to(device), words()).sample
            latents = scheduler.step(predicted, step, latents).prev_sample
        return latents

    return model, sample


def euler_loop():
    model = unet_condition()[0]
    scheduler = diffusers.EulerDiscreteScheduler()

    def sample(m):
        scheduler.set_timesteps(3, device=device)
        latents = torch.randn(1, 4, 8, 8).to(device) * scheduler.init_noise_sigma
        for step in scheduler.timesteps:
            scaled = scheduler.scale_model_input(latents, step)
            latents = scheduler.step(m(scaled, step, words()).sample, step, latents).prev_sample
        return latents

    return model, sample


model, use = globals()[name]()
model = model.eval().to(device)
results = {}
with torch.no_grad():
    start = time.perf_counter()
    results["first"] = use(model).cpu()
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(2):
        results[f"answer{call}"] = use(model).cpu()
torch.save(results, path)
