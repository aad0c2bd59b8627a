"""Entries of libraries around torch: kornia, diffusers, peft, torch_geometric and others."""

from collections.abc import Iterator

from compat.entry import Entry

CASES = {
    ("kornia_operations", "images"): (
        "colours blurs edges warps perspectives rotations morphology enhancements histograms"
        " features losses distances boxes"
    ),
    ("segmenters", "images"): (
        "unet unetplusplus manet linknet fpn pspnet deeplabv3 deeplabv3plus upernet segformer"
    ),
    ("diffusers_models", "diffusers"): (
        "unet_condition unet_plain controlnet autoencoder tiny_autoencoder quantized_autoencoder"
        " dit stable_diffusion_3 flux pixart prior sampling_loop euler_loop"
    ),
    ("peft_adapters", "adapters"): (
        "lora dora rslora adalora ia3 loha lokr oft boft vera hra fourierft prompt prefix layernorm"
    ),
    ("research_libraries", "research"): (
        "lightning_predict classification_metrics regression_metrics rearranged predictive"
    ),
    ("geometric_layers", "graphs"): (
        "GCNConv GATConv GATv2Conv SAGEConv GINConv GraphConv ChebConv TAGConv SGConv APPNP"
        " ARMAConv TransformerConv EdgeConv PNAConv GatedGraphConv ResGatedGraphConv GENConv"
        " ClusterGCNConv LEConv SuperGATConv FAConv GCN2Conv MixHopConv FiLMConv HypergraphConv"
        " TopKPooling SAGPooling ASAPooling"
    ),
}
WITHOUT_WEIGHTS = {"APPNP"}
RESEARCH_WITHOUT_MODEL = ("picture_metrics", "variational")


def library_entries() -> Iterator[Entry]:
    """One a model, a layer, a method or a subject."""
    for (program, group), names in CASES.items():
        for name in names.split():
            yield Entry(program, (name,), group=group, has_model=name not in WITHOUT_WEIGHTS)
    yield Entry("research_libraries", ("lightning_fit",), group="research", trains=True)
    for name in RESEARCH_WITHOUT_MODEL:
        yield Entry("research_libraries", (name,), group="research", has_model=False)
