"""Works on pictures with torchvision as its examples do: RECIPE."""

import sys
import warnings

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision import models, ops, tv_tensors
from torchvision.models import detection
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, make_grid

path, recipe = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
picture = torch.randint(0, 256, (3, 48, 64), dtype=torch.uint8)
boxes = torch.tensor([[2.0, 3, 20, 30], [4, 4, 22, 28], [30, 10, 60, 40]])
results = {}


def note(name, value):
    results[name] = value.detach().as_subclass(torch.Tensor).cpu().clone()


def transforms():
    steps = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),  # resizing bytes is another kernel on the CPU
            v2.Resize(40, antialias=True),
            v2.CenterCrop(32),
            v2.ColorJitter(0.2, 0.2, 0.2, 0.1),
            v2.RandomHorizontalFlip(0.5),
            v2.RandomRotation(10),
            v2.GaussianBlur(3),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            v2.RandomErasing(1.0),
        ]
    )
    note("first", steps(picture.to(device)))
    note("second", steps(torch.stack([picture] * 2).to(device)))
    for name in ("RandomPosterize", "RandomSolarize", "RandomAutocontrast", "RandomEqualize"):
        extra = {"RandomPosterize": {"bits": 3}, "RandomSolarize": {"threshold": 100.0}}
        note(name, getattr(v2, name)(**extra.get(name, {}), p=1.0)(picture.to(device)))
    note("perspective", v2.RandomPerspective(0.3, p=1.0)(picture.to(device)))
    note("elastic", v2.ElasticTransform(20.0)(picture.to(device)))
    note("augmented", v2.RandAugment()(picture.to(device)))
    note("five", torch.stack(v2.FiveCrop(16)(picture.to(device))))
    note("grey", v2.functional.rgb_to_grayscale(picture.to(device)))


def annotated():
    image = tv_tensors.Image(picture.to(device) / 255)
    found = tv_tensors.BoundingBoxes(boxes.to(device), format="XYXY", canvas_size=(48, 64))
    mask = tv_tensors.Mask((picture[0] > 128).to(device))
    steps = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize((24, 32)), v2.Pad(2)])
    image, target = steps(
        image, {"boxes": found, "masks": mask, "labels": torch.arange(3).to(device)}
    )
    assert isinstance(image, tv_tensors.Image)
    note("image", image)
    note("boxes", target["boxes"])
    note("mask", target["masks"])
    note(
        "sanitized",
        v2.SanitizeBoundingBoxes()({"boxes": found, "labels": torch.arange(3).to(device)})["boxes"],
    )
    note("converted", v2.ConvertBoundingBoxFormat("CXCYWH")(found))


def mixed_up():
    images = torch.rand(4, 3, 16, 16).to(device)
    labels = torch.arange(4).to(device)
    for name, mix in {"cut": v2.CutMix(num_classes=4), "mix": v2.MixUp(num_classes=4)}.items():
        made, soft = mix(images, labels)
        note(name, made)
        note(f"{name}_labels", soft)


def box_operations():
    given, scores = boxes.to(device), torch.tensor([0.9, 0.8, 0.7]).to(device)
    note("nms", ops.nms(given, scores, 0.5))
    note("batched", ops.batched_nms(given, scores, torch.tensor([0, 1, 0]).to(device), 0.5))
    note("iou", ops.box_iou(given, given))
    note("generalized", ops.generalized_box_iou(given, given))
    note("clipped", ops.clip_boxes_to_image(given * 2, (48, 64)))
    note("small", ops.remove_small_boxes(given, 19))
    features = torch.rand(1, 4, 24, 32).to(device)
    note("align", ops.roi_align(features, [given / 2], 5, sampling_ratio=2))
    note("pool", ops.roi_pool(features, [given / 2], 3))
    note("ps", ops.ps_roi_align(features, [given / 2], 2, 1.0))
    offset = torch.randn(1, 18, 24, 32).to(device)
    note(
        "deformed",
        ops.deform_conv2d(features, offset, torch.ones(2, 4, 3, 3).to(device), padding=1),
    )
    note("masks", ops.masks_to_boxes((picture[:2] > 250).to(device)))
    note("focal", ops.sigmoid_focal_loss(scores, torch.ones(3).to(device), reduction="mean"))
    note("complete", ops.complete_box_iou_loss(given, given + 1, reduction="sum"))
    note("dropped", ops.StochasticDepth(0.0, "row").to(device)(features))


def drawn():
    given = picture.to(device)
    note("boxes", draw_bounding_boxes(given, boxes.to(device), width=2))
    note("masks", draw_segmentation_masks(given, (given[:1] > 128), alpha=0.5))
    note("grid", make_grid(torch.rand(5, 3, 8, 8).to(device), nrow=3, normalize=True))
    note("flow", torchvision.utils.flow_to_image(torch.rand(1, 2, 8, 8).to(device)))


def feature_extractors():
    net = models.resnet18(weights=None).to(device).eval()
    x = torch.rand(2, 3, 64, 64).to(device)
    names = {"layer1": "low", "layer4": "high", "flatten": "flat"}
    with torch.no_grad():
        for found in (
            create_feature_extractor(net, names)(x),
            IntermediateLayerGetter(net, {"layer2": "mid"})(x),
        ):
            for name, value in found.items():
                note(name, value)
        pyramid = ops.FeaturePyramidNetwork([64, 512], 8).to(device).eval()
        found = create_feature_extractor(net, {"layer1": "0", "layer4": "1"})(x)
        for name, value in pyramid(found).items():
            note(f"pyramid{name}", value)
        trunk = nn.Sequential(*list(net.children())[:-2]).eval()
        note("trunk", trunk(x))
        note("again", trunk(x))


def detector(make, **options):
    net = make(weights=None, weights_backbone=None, num_classes=4, **options).to(device).eval()
    with torch.no_grad():
        for call in range(2):
            found = net([torch.rand(3, 64, 80).to(device), torch.rand(3, 72, 64).to(device)])
            for number, one in enumerate(found):
                for name, value in one.items():
                    note(f"{call}{number}{name}", value[:20])


def faster():
    detector(detection.fasterrcnn_mobilenet_v3_large_320_fpn, min_size=64, max_size=96)


def masks():
    detector(detection.maskrcnn_resnet50_fpn, min_size=64, max_size=96)


def keypoints():
    net = detection.keypointrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=2,
        num_keypoints=3,
        min_size=64,
        max_size=96,
    )
    net.to(device).eval()
    with torch.no_grad():
        found = net([torch.rand(3, 64, 80).to(device)])[0]
    note("boxes", found["boxes"][:5])
    note("keypoints", found["keypoints"][:5])


def one_stage():
    detector(detection.retinanet_resnet50_fpn, min_size=64, max_size=96)


def anchor_free():
    detector(detection.fcos_resnet50_fpn, min_size=64, max_size=96)


def single_shot():
    detector(detection.ssdlite320_mobilenet_v3_large)


def detector_trained():
    net = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=96
    ).to(device)
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    for _ in range(2):
        target = {"boxes": boxes.to(device), "labels": torch.tensor([1, 2, 1]).to(device)}
        losses = net([torch.rand(3, 64, 80).to(device)], [target])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)


def segmented():
    for make in (models.segmentation.lraspp_mobilenet_v3_large, models.segmentation.fcn_resnet50):
        net = make(weights=None, weights_backbone=None, num_classes=5).to(device).eval()
        with torch.no_grad():
            found = net(torch.rand(1, 3, 64, 64).to(device))["out"]
        note(make.__name__, found)
        note(f"{make.__name__}_classes", found.argmax(1))


def fine_tuned():
    net = models.mobilenet_v3_small(weights=None)
    for parameter in net.features.parameters():
        parameter.requires_grad = False
    net.classifier[3] = nn.Linear(net.classifier[3].in_features, 3)
    net = net.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.classifier.parameters(), 1e-3)
    for _ in range(2):
        x = torch.rand(4, 3, 32, 32).to(device, memory_format=torch.channels_last)
        loss = F.cross_entropy(net(x), torch.tensor([0, 1, 2, 0], device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    note("loss", loss)
    with torch.inference_mode():
        note("answer", net.eval()(x).softmax(1))


def styled():
    vgg = models.vgg11(weights=None).features[:9].to(device).eval().requires_grad_(False)
    content = torch.rand(1, 3, 32, 32).to(device)
    image = content.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([image], 0.02)

    def gram(x):
        flat = x.flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[2]

    target = gram(vgg(torch.rand(1, 3, 32, 32).to(device)))
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(gram(vgg(image)), target)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            image.clamp_(0, 1)
    note("image", image)


globals()[recipe]()
torch.save(results, path)
