"""Entries of models that see: torchvision, the models of Table 1 and of timm."""

from collections.abc import Iterator

from compat.entry import Entry

# Table 1 of the thesis: its 22 models, by the names that torchvision gives them.
TABLE_1 = {
    "squeezenet": ("squeezenet1_1", "squeezenet1_0"),
    "resnet": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    "alexnet": ("alexnet",),
    "resnext": ("resnext50_32x4d", "resnext101_32x8d"),
    "densenet": ("densenet121", "densenet161", "densenet169", "densenet201"),
    "inception": ("inception_v3",),
    "vgg": ("vgg11", "vgg13", "vgg16", "vgg16_bn", "vgg19"),
    "wide_resnet": ("wide_resnet50_2", "wide_resnet101_2"),
}
TIMM = {
    96: (
        "convmixer_1024_20_ks9_p14 edgenext_xx_small efficientvit_b0 fasternet_t0 gernet_s"
        " ghostnet_050 hgnetv2_b0 hrnet_w18_small inception_next_atto lcnet_050 mambaout_femto"
        " mixnet_s mobilenetv4_conv_small mobilevitv2_050 nextvit_small nf_regnet_b0 pvt_v2_b0"
        " repghostnet_050 repvgg_a0 repvit_m0_9 resnet18d skresnet18 tinynet_e"
    ),
    224: (
        "caformer_s18 coat_lite_tiny coatnet_nano_rw_224 convit_tiny davit_tiny efficientvit_m0"
        " eva02_tiny_patch14_224 gcvit_xxtiny hiera_tiny_224 levit_128s pit_xs_224 swiftformer_xs"
        " tiny_vit_5m_224 mvitv2_tiny nest_tiny twins_svt_small visformer_tiny"
    ),
}
QUICK_OF_TABLE_1 = {("resnet18", 32)}


def table_1_entries() -> Iterator[Entry]:
    for program, models in TABLE_1.items():
        for model in models:
            for batch in (1, 32):
                quick = (model, batch) in QUICK_OF_TABLE_1
                yield Entry(program, (model, str(batch)), quick=quick, group="vision")


def torchvision_entries() -> Iterator[Entry]:
    for model in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield Entry("segmentation", (model,), group="vision")
    for model in (
        "fasterrcnn_resnet50_fpn",
        "maskrcnn_resnet50_fpn",
        "retinanet_resnet50_fpn",
        "ssdlite320_mobilenet_v3_large",
        "fcos_resnet50_fpn",
    ):
        yield Entry("detection", (model,), group="vision")
    for model in ("r3d_18", "mc3_18", "swin3d_t"):
        yield Entry("video_clips", (model,), group="vision")
    for model, size in {
        "vit_b_16": 224,
        "swin_t": 96,
        "convnext_tiny": 96,
        "mobilenet_v3_small": 96,
        "efficientnet_b0": 96,
        "regnet_y_400mf": 96,
        "shufflenet_v2_x1_0": 96,
        "googlenet": 96,
        "maxvit_t": 224,
    }.items():
        yield Entry("vision_models", (model, str(size)), group="vision")
    yield Entry("optical_flow", group="vision")
    for model, size in {
        "efficientnet_lite0": 96,
        "mixer_s32_224": 224,
        "deit_tiny_patch16_224": 224,
        "convnextv2_atto": 96,
        "mobilevit_xxs": 96,
        "resnest14d": 96,
    }.items():
        yield Entry("timm_models", (model, str(size)), group="vision")
    for size, models in TIMM.items():
        for model in models.split():
            yield Entry("timm_models", (model, str(size)), group="vision")
    yield Entry("diffusion", group="vision")
    yield Entry("autoencoder", group="vision")


def vision_entries() -> Iterator[Entry]:
    """All of them."""
    yield from table_1_entries()
    yield from torchvision_entries()
