"""Works on pictures with kornia: SUBJECT."""

import sys
import time

import kornia
import torch
from torch import nn

path, subject = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def colours(x):
    return [
        kornia.color.rgb_to_grayscale(x),
        kornia.color.rgb_to_hsv(x),
        kornia.color.rgb_to_lab(x),
        kornia.color.rgb_to_ycbcr(x),
    ]


def blurs(x):
    return [
        kornia.filters.gaussian_blur2d(x, (5, 5), (1.5, 1.5)),
        kornia.filters.median_blur(x, (3, 3)),
        kornia.filters.box_blur(x, (3, 3)),
        kornia.filters.bilateral_blur(x, (3, 3), 0.1, (1.5, 1.5)),
        kornia.filters.motion_blur(x, 5, 35.0, 0.5),
    ]


def edges(x):
    grey = kornia.color.rgb_to_grayscale(x)
    return [
        kornia.filters.sobel(x),
        kornia.filters.laplacian(x, 3),
        kornia.filters.canny(grey)[1],
        kornia.filters.spatial_gradient(x),
        kornia.filters.unsharp_mask(x, (3, 3), (1.5, 1.5)),
    ]


def warps(x):
    angle = torch.tensor([30.0, -20.0], device=x.device)
    return [
        kornia.geometry.transform.rotate(x, angle),
        kornia.geometry.transform.resize(x, (20, 24)),
        kornia.geometry.transform.hflip(x),
        kornia.geometry.transform.pyrdown(x),
        kornia.geometry.transform.translate(x, torch.tensor([[1.0, 2.0]] * 2, device=x.device)),
    ]


def perspectives(x):
    corners = [[[0.0, 0.0], [31.0, 0.0], [31.0, 31.0], [0.0, 31.0]]] * 2
    source = torch.tensor(corners, device=x.device)
    target = source * 0.8 + 2
    matrix = kornia.geometry.transform.get_perspective_transform(source, target)
    return [matrix, kornia.geometry.transform.warp_perspective(x, matrix, (32, 32))]


def rotations(x):
    axis = x.mean((2, 3))
    matrix = kornia.geometry.conversions.axis_angle_to_rotation_matrix(axis)
    return [
        matrix,
        kornia.geometry.conversions.rotation_matrix_to_axis_angle(matrix),
        kornia.geometry.conversions.rotation_matrix_to_quaternion(matrix),
        kornia.geometry.conversions.cart2pol(axis[:, 0], axis[:, 1])[0],
    ]


def morphology(x):
    kernel = torch.ones(3, 3, device=x.device)
    return [
        kornia.morphology.dilation(x, kernel),
        kornia.morphology.erosion(x, kernel),
        kornia.morphology.opening(x, kernel),
        kornia.morphology.gradient(x, kernel),
    ]


def enhancements(x):
    return [
        kornia.enhance.adjust_brightness(x, 0.2),
        kornia.enhance.adjust_contrast(x, 1.5),
        kornia.enhance.adjust_hue(x, 0.3),
        kornia.enhance.equalize(x),
        kornia.enhance.normalize_min_max(x),
        kornia.enhance.sharpness(x, 0.7),
    ]


def histograms(x):
    bins = torch.linspace(0, 1, 16, device=x.device)
    return [
        kornia.enhance.histogram(x[:, 0].flatten(1), bins, torch.tensor(0.05, device=x.device)),
        kornia.enhance.equalize_clahe(x, grid_size=(4, 4)),
        kornia.enhance.posterize(x, 4),
        kornia.enhance.solarize(x, 0.5),
    ]


def features(x):
    grey = kornia.color.rgb_to_grayscale(x)
    return [
        kornia.feature.harris_response(grey),
        kornia.feature.gftt_response(grey),
        kornia.feature.hessian_response(grey),
        kornia.feature.SIFTDescriptor(32).to(x.device)(grey),
    ]


def losses(x):
    other = x.flip(-1)
    return [
        kornia.losses.ssim_loss(x, other, 5),
        kornia.losses.psnr_loss(x, other, 1.0),
        kornia.losses.total_variation(x),
        kornia.metrics.ssim(x, other, 5),
    ]


def distances(x):
    mask = (kornia.color.rgb_to_grayscale(x) > 0.5).float()
    return [
        kornia.contrib.distance_transform(mask),
        kornia.contrib.connected_components(mask, num_iterations=20),
        kornia.contrib.extract_tensor_patches(x, 16, 16),
    ]


def boxes(x):
    corners = torch.tensor([[[2.0, 2.0], [20.0, 2.0], [20.0, 20.0], [2.0, 20.0]]], device=x.device)
    found = kornia.geometry.bbox.bbox_to_mask(corners, 32, 32)
    crops = kornia.geometry.transform.crop_and_resize(x[:1], corners, (8, 8))
    return [found, crops, kornia.geometry.bbox.infer_bbox_shape(corners)[0]]


class Subject(nn.Module):
    """A layer, then kornia's functions on what it gives."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return globals()[subject](torch.sigmoid(self.layer(x) * 4))


model = Subject().eval().to(device)
results = {}
with torch.no_grad():
    start = time.perf_counter()
    results["first"] = [part.cpu() for part in model(torch.rand(2, 3, 32, 32).to(device))]
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(2):
        answer = model(torch.rand(2, 3, 32, 32).to(device))
        results[f"answer{call}"] = [part.cpu() for part in answer]
torch.save(results, path)
