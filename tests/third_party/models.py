"""Tiny models of packages outside transformers, with random weights: one table for the tests and the docs.

`scripts/docs third-party` writes their rows of docs/supported-models.json, and `test_models.py` checks each row again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.third_party.packages import load

Inputs = dict[str, Any]
Build = Callable[[], tuple[nn.Module, Inputs]]


@dataclass(frozen=True)
class ThirdParty:
    """A model class of another package.

    Args:
        package: Name under which the package is imported.
        kind: Group of the docs table.
        build: Returns the model and its keyword arguments.
        dense: Name of its package's own dense attention, and a context in which the model runs it. The context may
            have a list as its value, which gets the weights. Default: the math kernel of torch.
    """

    package: str
    kind: str
    build: Build
    dense: tuple[str, Callable[[nn.Module], Any]] | None = None


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tokens(*shape: int, size: int = 50) -> torch.Tensor:
    return torch.randint(1, size, shape, generator=torch.Generator().manual_seed(1))


# diffusers


@contextlib.contextmanager
def use_attn_processor(model: Any) -> Iterator[None]:
    """Replace the fused processors of a diffusers model by `AttnProcessor`, which stores its weights."""
    before = model.attn_processors
    model.set_attn_processor(load("diffusers.models.attention_processor").AttnProcessor())
    try:
        yield
    finally:
        model.set_attn_processor(before)


PROCESSOR = ("AttnProcessor", use_attn_processor)


def _diffusers(name: str, inputs: Inputs, **config: Any) -> Build:
    return lambda: (getattr(load("diffusers"), name)(**config), inputs)


BLOCKS = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "in_channels": 4,
    "out_channels": 4,
}
CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "sample_size": 16,
}
STEP = torch.tensor([1])
IMAGE = {"sample": noise(1, 4, 16, 16), "timestep": STEP}
TEXT = {"encoder_hidden_states": noise(1, 7, 32)}
HEADS = {"attention_head_dim": 8, "num_attention_heads": 4, "num_layers": 2}

DIFFUSERS: dict[str, tuple[Build, Any]] = {
    "UNet2DConditionModel": (
        _diffusers("UNet2DConditionModel", IMAGE | TEXT, **BLOCKS, **CROSS),
        PROCESSOR,
    ),
    "UNet2DModel": (
        _diffusers(
            "UNet2DModel",
            IMAGE,
            **BLOCKS,
            sample_size=16,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        None,
    ),
    "UNet3DConditionModel": (
        _diffusers(
            "UNet3DConditionModel",
            {"sample": noise(1, 4, 3, 16, 16), "timestep": STEP} | TEXT,
            **BLOCKS,
            down_block_types=("DownBlock3D", "CrossAttnDownBlock3D"),
            up_block_types=("CrossAttnUpBlock3D", "UpBlock3D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            sample_size=16,
        ),
        PROCESSOR,
    ),
    "ControlNetModel": (
        _diffusers(
            "ControlNetModel",
            IMAGE | TEXT | {"controlnet_cond": noise(1, 3, 32, 32)},
            in_channels=4,
            block_out_channels=(32, 64),
            layers_per_block=1,
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            conditioning_embedding_out_channels=(16, 32),
        ),
        PROCESSOR,
    ),
    "AutoencoderKL": (
        _diffusers(
            "AutoencoderKL",
            {"sample": noise(1, 3, 16, 16)},
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=8,
        ),
        PROCESSOR,
    ),
    "VQModel": (
        _diffusers(
            "VQModel",
            {"sample": noise(1, 3, 16, 16)},
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=8,
            latent_channels=3,
        ),
        None,
    ),
    "Transformer2DModel": (
        _diffusers(
            "Transformer2DModel",
            {"hidden_states": noise(1, 32, 8, 8)} | TEXT,
            **HEADS,
            in_channels=32,
            cross_attention_dim=32,
            norm_num_groups=8,
        ),
        None,
    ),
    "PriorTransformer": (
        _diffusers(
            "PriorTransformer",
            {
                "hidden_states": noise(1, 32),
                "timestep": STEP,
                "proj_embedding": noise(1, 32),
                "encoder_hidden_states": noise(1, 7, 32),
            },
            **HEADS,
            embedding_dim=32,
            num_embeddings=7,
            additional_embeddings=4,
        ),
        PROCESSOR,
    ),
    "DiTTransformer2DModel": (
        _diffusers(
            "DiTTransformer2DModel",
            {"hidden_states": noise(1, 4, 16, 16), "timestep": STEP, "class_labels": STEP},
            **HEADS,
            in_channels=4,
            out_channels=8,
            sample_size=16,
            num_embeds_ada_norm=8,
        ),
        None,
    ),
    "PixArtTransformer2DModel": (
        _diffusers(
            "PixArtTransformer2DModel",
            {
                "hidden_states": noise(1, 4, 16, 16),
                "timestep": STEP,
                "encoder_attention_mask": torch.tensor([[1.0] * 5 + [0.0] * 2]),
                "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
            }
            | TEXT,
            **HEADS,
            in_channels=4,
            out_channels=8,
            sample_size=16,
            cross_attention_dim=32,
            caption_channels=32,
            use_additional_conditions=False,
        ),
        PROCESSOR,
    ),
    "SD3Transformer2DModel": (
        _diffusers(
            "SD3Transformer2DModel",
            {"hidden_states": noise(1, 4, 16, 16), "timestep": STEP, "pooled_projections": noise(1, 64)}
            | TEXT,
            **HEADS,
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
        ),
        None,
    ),
    "FluxTransformer2DModel": (
        _diffusers(
            "FluxTransformer2DModel",
            {
                "hidden_states": noise(1, 16, 4),
                "timestep": STEP.float(),
                "pooled_projections": noise(1, 32),
                "img_ids": torch.zeros(16, 3),
                "txt_ids": torch.zeros(7, 3),
            }
            | TEXT,
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        ),
        None,
    ),
    "ChromaTransformer2DModel": (
        _diffusers(
            "ChromaTransformer2DModel",
            {
                "hidden_states": noise(1, 16, 4),
                "timestep": STEP.float(),
                "img_ids": torch.zeros(16, 3),
                "txt_ids": torch.zeros(7, 3),
            }
            | TEXT,
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=[4, 4, 8],
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        None,
    ),
    "AuraFlowTransformer2DModel": (
        _diffusers(
            "AuraFlowTransformer2DModel",
            {"hidden_states": noise(1, 4, 16, 16), "timestep": STEP.float()} | TEXT,
            sample_size=16,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            out_channels=4,
            pos_embed_max_size=64,
        ),
        None,
    ),
    "SanaTransformer2DModel": (
        _diffusers(
            "SanaTransformer2DModel",
            {"hidden_states": noise(1, 4, 8, 8), "timestep": STEP} | TEXT,
            **HEADS,
            in_channels=4,
            out_channels=4,
            num_cross_attention_heads=4,
            cross_attention_head_dim=8,
            cross_attention_dim=32,
            caption_channels=32,
            sample_size=8,
        ),
        None,
    ),
    "CogVideoXTransformer3DModel": (
        _diffusers(
            "CogVideoXTransformer3DModel",
            {"hidden_states": noise(1, 1, 4, 8, 8), "timestep": STEP} | TEXT,
            **HEADS,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=32,
            sample_width=8,
            sample_height=8,
            sample_frames=1,
            max_text_seq_length=7,
        ),
        None,
    ),
    "LTXVideoTransformer3DModel": (
        _diffusers(
            "LTXVideoTransformer3DModel",
            {
                "hidden_states": noise(1, 32, 4),
                "timestep": STEP,
                "encoder_attention_mask": torch.ones(1, 7),
                "num_frames": 2,
                "height": 4,
                "width": 4,
            }
            | TEXT,
            **HEADS,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=32,
            caption_channels=32,
        ),
        None,
    ),
    "WanTransformer3DModel": (
        _diffusers(
            "WanTransformer3DModel",
            {"hidden_states": noise(1, 4, 2, 8, 8), "timestep": STEP} | TEXT,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        ),
        None,
    ),
    "MochiTransformer3DModel": (
        _diffusers(
            "MochiTransformer3DModel",
            {
                "hidden_states": noise(1, 4, 2, 8, 8),
                "timestep": STEP,
                "encoder_attention_mask": torch.ones(1, 7).bool(),
            }
            | TEXT,
            **HEADS,
            in_channels=4,
            pooled_projection_dim=16,
            text_embed_dim=32,
            time_embed_dim=4,
            max_sequence_length=7,
        ),
        None,
    ),
    "AllegroTransformer3DModel": (
        _diffusers(
            "AllegroTransformer3DModel",
            {"hidden_states": noise(1, 4, 2, 8, 8), "timestep": STEP} | TEXT,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=24,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=48,
            caption_channels=32,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
        ),
        None,
    ),
    "HunyuanDiT2DModel": (
        _diffusers(
            "HunyuanDiT2DModel",
            {
                "hidden_states": noise(1, 4, 8, 8),
                "timestep": STEP.float(),
                "text_embedding_mask": torch.ones(1, 7),
                "encoder_hidden_states_t5": noise(1, 5, 32),
                "text_embedding_mask_t5": torch.ones(1, 5),
                "image_meta_size": torch.tensor([[8, 8, 8, 8, 0, 0]]),
                "style": torch.tensor([0]),
                "image_rotary_emb": [torch.ones(16, 8), torch.zeros(16, 8)],
            }
            | TEXT,
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=32,
            cross_attention_dim_t5=32,
            pooled_projection_dim=4,
            hidden_size=32,
            text_len=7,
            text_len_t5=5,
            activation_fn="gelu-approximate",
        ),
        None,
    ),
    "StableAudioDiTModel": (
        _diffusers(
            "StableAudioDiTModel",
            {
                "hidden_states": noise(1, 4, 16),
                "timestep": STEP,
                "global_hidden_states": noise(1, 1, 32),
            }
            | TEXT,
            sample_size=16,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_attention_heads=2,
            out_channels=4,
            cross_attention_dim=32,
            time_proj_dim=8,
            global_states_input_dim=32,
            cross_attention_input_dim=32,
        ),
        None,
    ),
    "QwenImageTransformer2DModel": (
        _diffusers(
            "QwenImageTransformer2DModel",
            {
                "hidden_states": noise(1, 16, 16),
                "timestep": STEP.float(),
                "encoder_hidden_states_mask": torch.ones(1, 7).bool(),
                "img_shapes": [(1, 4, 4)],
            }
            | TEXT,
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(8, 4, 4),
        ),
        None,
    ),
}

# timm


@contextlib.contextmanager
def switch_off_fused_attention(model: nn.Module) -> Iterator[None]:
    """Make the layers of timm compute their weights in Python."""
    fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
    for module in fused:
        module.fused_attn = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in fused:
            module.fused_attn = True  # type: ignore[assignment]


@contextlib.contextmanager
def collect_attention(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what the `get_attention` of each layer of ConViT returns."""
    collected: list[torch.Tensor] = []

    def collect(get_attention: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        collected.append(get_attention(x))
        return collected[-1]

    layers = [module for module in model.modules() if hasattr(module, "get_attention")]
    for layer in layers:
        layer.get_attention = functools.partial(collect, layer.get_attention)  # type: ignore[assignment]
    try:
        yield collected
    finally:
        for layer in layers:
            del layer.get_attention


def _timm(name: str, edge: int = 32, **options: Any) -> Build:
    return lambda: (load("timm").create_model(name, **options), {"x": noise(2, 3, edge, edge)})


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
TIMM: dict[str, Build] = {
    "VisionTransformer": _timm("vit_tiny_patch16_224", **SMALL),
    "VisionTransformer, registers": _timm("vit_small_patch14_reg4_dinov2", **SMALL),
    "VisionTransformer, SigLIP pool": _timm("vit_base_patch16_siglip_224", **SMALL),
    "VisionTransformerDistilled": _timm("deit_tiny_distilled_patch16_224", **SMALL),
    "NaFlexVit": _timm("naflexvit_base_patch16_gap", 32, embed_dim=32, depth=2, num_heads=4, patch_size=8),
    "Beit": _timm("beit_base_patch16_224", **SMALL),
    "Eva": _timm("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=32, depth=2, num_heads=4),
    "SwinTransformer": _timm(
        "swin_tiny_patch4_window7_224", 56, img_size=56, depths=(1, 2), embed_dim=16, num_heads=(2, 4)
    ),
    "SwinTransformerV2": _timm(
        "swinv2_tiny_window8_256", 64, img_size=64, depths=(1, 2), embed_dim=16, num_heads=(2, 4)
    ),
    "SwinTransformerV2Cr": _timm(
        "swinv2_cr_tiny_224", 64, img_size=64, window_size=4, depths=(1, 2), embed_dim=16, num_heads=(2, 4)
    ),
    "Cait": _timm("cait_xxs24_224", **SMALL),
    "Xcit": _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
    "CrossVit": _timm("crossvit_9_240", 240),
    "Levit": _timm("levit_128s", 224),
    "MultiScaleVit": _timm("mvitv2_tiny", 64, img_size=64),
    "MaxxVit": _timm("maxvit_nano_rw_256", 64, img_size=64),
    "Nest": _timm("nest_tiny", 224),
    "PoolingVisionTransformer": _timm("pit_ti_224", 224),
    "PyramidVisionTransformerV2": _timm("pvt_v2_b0", 64),
    "TNT": _timm("tnt_s_legacy_patch16_224", 224, depth=2),
    "Twins": _timm("twins_svt_small", 64, img_size=64),
    "VOLO": _timm("volo_d1_224", 64, img_size=64),
    "Hiera": _timm("hiera_tiny_224", 64, img_size=(64, 64)),
    "EfficientFormer": _timm("efficientformer_l1", 224),
    "MobileVit": _timm("mobilevit_xxs", 64),
    "FastVit": _timm("fastvit_sa12", 64),
    "DaViT": _timm("davit_tiny", 64),
    "VisionTransformerSAM": _timm(
        "samvit_base_patch16", 64, **SMALL | {"img_size": 64}, window_size=4, global_attn_indexes=(1,)
    ),
}

# open_clip


def _open_clip(name: str, part: str) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        open_clip = load("open_clip")
        vision = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
        text = {"context_length": 12, "vocab_size": 50, "width": 32, "heads": 4, "layers": 2}
        if name == "CoCa":
            vision |= {"attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
            text |= {"embed_cls": True, "output_tokens": True}
            decoder = {"context_length": 12, "vocab_size": 50, "width": 32, "heads": 4, "layers": 2}
            model = open_clip.CoCa(32, decoder, text, vision)
            nn.init.normal_(model.text_decoder.text_projection)  # which open_clip leaves as the memory was
        else:
            model = getattr(open_clip, name)(embed_dim=32, vision_cfg=vision, text_cfg=text)
        image, words = {"image": noise(2, 3, 32, 32)}, {"text": tokens(2, 12)}
        if part == "visual":
            return model.visual, {"x": image["image"]}
        return (model.text, words) if part == "text" else (model, image | words)

    return build


# x-transformers


@contextlib.contextmanager
def switch_off_flash(model: nn.Module) -> Iterator[None]:
    """Make the layers of x-transformers compute their weights in Python."""
    fused = [module for module in model.modules() if getattr(module, "flash", False)]
    for module in fused:
        module.flash = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in fused:
            module.flash = True  # type: ignore[assignment]


def _x_transformers(kind: str, flash: bool = True, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        x = load("x_transformers")
        sizes = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, "attn_flash": flash, **options}
        if kind == "ViTransformerWrapper":
            layers = x.Encoder(**sizes)
            model = x.ViTransformerWrapper(image_size=32, patch_size=8, attn_layers=layers, num_classes=5)
            return model, {"img": noise(2, 3, 32, 32)}
        if kind == "XTransformer":
            own = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in {
                "num_tokens": 50, "depth": 2, "heads": 4, "max_seq_len": 16, "attn_flash": flash,
            }.items()}  # fmt: skip
            return x.XTransformer(dim=32, **own), {"src": tokens(2, 12), "tgt": tokens(2, 9)}
        if kind == "ContinuousTransformerWrapper":
            model = x.ContinuousTransformerWrapper(
                dim_in=8, dim_out=8, max_seq_len=16, attn_layers=x.Encoder(**sizes)
            )
            return model, {"x": noise(2, 12, 8)}
        layers = getattr(x, kind)(**sizes)
        return x.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers), {"x": tokens(2, 12)}

    return build


# Proteins


def _esmc() -> tuple[nn.Module, Inputs]:
    esmc = load("esm.models.esmc")
    model = esmc.ESMC(d_model=64, n_heads=4, n_layers=2, tokenizer=None, use_flash_attn=False)
    ids = tokens(1, 30, size=24)
    return model, {"sequence_tokens": ids, "sequence_id": torch.ones_like(ids, dtype=torch.bool)}


def _esm3() -> tuple[nn.Module, Inputs]:
    esm3 = load("esm.models.esm3")
    nothing = lambda device: nn.Identity()  # noqa: E731
    model = esm3.ESM3(64, 4, 8, 2, nothing, nothing, nothing, None)
    return model, {"sequence_tokens": tokens(1, 20, size=24)}


# torchvision, torchaudio, speechbrain, conformer, encodec


def _torchvision(name: str, **options: Any) -> Build:
    return lambda: (
        getattr(load("torchvision.models"), name)(**options),
        {("input" if "swin" not in name.lower() else "x"): noise(1, 3, 64, 64)},
    )


def _torchvision_vit() -> tuple[nn.Module, Inputs]:
    vit = load("torchvision.models").VisionTransformer(32, 8, 2, 4, 32, 64)
    return vit, {"x": noise(2, 3, 32, 32)}


def _torchvision_swin(block: str) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        swin = load("torchvision.models.swin_transformer")
        v2 = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if block else {}
        return swin.SwinTransformer([4, 4], 16, [1, 2], [2, 4], [4, 4], **v2), {"x": noise(1, 3, 32, 32)}

    return build


def _torchvision_maxvit() -> tuple[nn.Module, Inputs]:
    maxvit = load("torchvision.models").MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=5)
    return maxvit, {"x": noise(1, 3, 64, 64)}


def _torchaudio_conformer() -> tuple[nn.Module, Inputs]:
    conformer = load("torchaudio.models").Conformer(32, 4, 64, 2, 7)
    return conformer, {"input": noise(2, 20, 32), "lengths": torch.tensor([20, 14])}


def _torchaudio_emformer() -> tuple[nn.Module, Inputs]:
    emformer = load("torchaudio.models").Emformer(32, 4, 64, 2, 4, right_context_length=1)
    return emformer, {"input": noise(2, 17, 32), "lengths": torch.tensor([16, 12])}


def _torchaudio_wav2vec2() -> tuple[nn.Module, Inputs]:
    model = load("torchaudio.models").wav2vec2_model(
        "group_norm",
        [(32, 10, 5), (32, 3, 2)],
        False,
        32,
        0.0,
        16,
        4,
        2,
        4,
        0.0,
        64,
        0.0,
        0.0,
        False,
        0.0,
        None,
    )
    return model, {"waveforms": noise(2, 400)}


def _speechbrain(encoder: str, attention: str) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        asr = load("speechbrain.lobes.models.transformer.TransformerASR")
        model = asr.TransformerASR(
            tgt_vocab=50, input_size=32, d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2,
            d_ffn=64, dropout=0.0, encoder_module=encoder, attention_type=attention, conformer_activation=nn.GELU,
            csgu_linear_units=64, normalize_before=True, causal=False,
        )  # fmt: skip
        return model, {"src": noise(2, 20, 32), "tgt": tokens(2, 9), "wav_len": torch.tensor([1.0, 0.7])}

    return build


def _conformer() -> tuple[nn.Module, Inputs]:
    return load("conformer").Conformer(dim=32, depth=2, dim_head=8, heads=4), {"x": noise(2, 20, 32)}


def _encodec() -> tuple[nn.Module, Inputs]:
    model = load("encodec.model").LMModel(n_q=2, card=50, dim=32, num_heads=4, num_layers=2)
    return model, {"indices": tokens(1, 2, 12)}


# torchtune, sentence-transformers, peft, bitsandbytes


def _torchtune(name: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        sizes = {
            "vocab_size": 50, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 32,
        }  # fmt: skip
        family = load(f"torchtune.models.{name}")
        return getattr(family, name)(**sizes | options), {"tokens": tokens(2, 12)}

    return build


def _tiny_model(name: str) -> Any:
    from tests.helpers.tiny_models import TINY

    return TINY[name]


def _tiny(name: str) -> tuple[Any, Inputs]:
    return _tiny_model(name).build(), _tiny_model(name).inputs("none")


def _sentence_transformer() -> tuple[nn.Module, Inputs]:
    modules = load("sentence_transformers.sentence_transformer.modules")
    encoder, inputs = _tiny("BERT")

    class Encoder(nn.Module):
        """A model of transformers in the place of `modules.Transformer`, whose constructor loads files."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_model = encoder

        def forward(self, features: Inputs) -> Inputs:
            return features | {"token_embeddings": self.auto_model(**features)[0]}

    model = load("sentence_transformers").SentenceTransformer(
        modules=[Encoder(), modules.Pooling(32), modules.Normalize()], device="cpu"
    )
    return model, {"input": {name: inputs[name] for name in ("input_ids", "attention_mask")}}


def _peft(kind: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        peft = load("peft")
        # It refuses the release of torchao that torchtune needs, and uses none of it here.
        load("peft.tuners.lora.torchao").is_torchao_available = lambda: False
        model, inputs = _tiny("Llama")
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(model, config), inputs

    return build


def _bitsandbytes(name: str) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        layers, tiny = load("bitsandbytes").nn, _tiny_model("Llama")
        # Where the processor multiplies bfloat16, it packs blocks of 64 inputs and 32 outputs.
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        config = type(tiny.config).from_dict(tiny.config.to_dict() | sizes)
        model, inputs = tiny._replace(config=config).build(), tiny.inputs("none")
        for module in list(model.modules()):
            for child, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear) and child.endswith("_proj"):
                    made = getattr(layers, name)(linear.in_features, linear.out_features, bias=False)
                    made.load_state_dict(linear.state_dict())
                    setattr(module, child, made.to("cpu"))
        return model, inputs

    return build


# vit-pytorch


def _vit_pytorch(module: str, name: str, image: str = "img", edge: int = 32, **options: Any) -> Build:
    sizes = {
        "image_size": 32,
        "patch_size": 8,
        "num_classes": 5,
        "dim": 32,
        "depth": 2,
        "heads": 4,
        "mlp_dim": 64,
    }

    def build() -> tuple[nn.Module, Inputs]:
        own = {key: value for key, value in (sizes | options).items() if value is not None}
        return getattr(load(f"vit_pytorch.{module}"), name)(**own), {image: noise(1, 3, edge, edge)}

    return build


DIFFUSION, VISION, BOTH = "diffusion", "images and video", "images or sound with text"
GENERATION, ENCODERS, PAIRS = "text generation", "text encoders", "text to text"
PROTEINS, SOUND = "proteins", "sound"
FUSED_OFF = ("fused_attn=False", switch_off_fused_attention)

X_TRANSFORMERS: dict[str, tuple[str, Build]] = {
    "Decoder": (GENERATION, _x_transformers("Decoder")),
    "Decoder, not fused": (GENERATION, _x_transformers("Decoder", flash=False)),
    "Decoder, grouped keys and rotary": (
        GENERATION,
        _x_transformers("Decoder", attn_kv_heads=2, rotary_pos_emb=True),
    ),
    "Decoder, talking heads": (
        GENERATION,
        _x_transformers("Decoder", flash=False, attn_pre_talking_heads=True),
    ),
    "Encoder": (ENCODERS, _x_transformers("Encoder")),
    "Encoder, ALiBi": (ENCODERS, _x_transformers("Encoder", alibi_pos_bias=True)),
    "XTransformer": (PAIRS, _x_transformers("XTransformer")),
    "ViTransformerWrapper": (VISION, _x_transformers("ViTransformerWrapper")),
    "ContinuousTransformerWrapper": ("other models", _x_transformers("ContinuousTransformerWrapper")),
}
MODELS: dict[str, ThirdParty] = {
    **{
        f"diffusers.{name}": ThirdParty("diffusers", DIFFUSION, build, dense)
        for name, (build, dense) in DIFFUSERS.items()
    },
    **{f"timm.{name}": ThirdParty("timm", VISION, build, FUSED_OFF) for name, build in TIMM.items()},
    "timm.ConVit": ThirdParty(
        "timm", VISION, _timm("convit_tiny", **SMALL), ("GPSA.get_attention", collect_attention)
    ),
    "open_clip.CLIP": ThirdParty("open_clip", BOTH, _open_clip("CLIP", "all")),
    "open_clip.CustomTextCLIP": ThirdParty("open_clip", BOTH, _open_clip("CustomTextCLIP", "all")),
    "open_clip.CoCa": ThirdParty("open_clip", BOTH, _open_clip("CoCa", "all")),
    "open_clip.VisionTransformer": ThirdParty("open_clip", VISION, _open_clip("CustomTextCLIP", "visual")),
    "open_clip.TextTransformer": ThirdParty("open_clip", ENCODERS, _open_clip("CustomTextCLIP", "text")),
    **{
        f"x_transformers.{name}": ThirdParty("x_transformers", kind, build, ("flash=False", switch_off_flash))
        for name, (kind, build) in X_TRANSFORMERS.items()
    },
    "esm.ESMC": ThirdParty("esm", PROTEINS, _esmc),
    "torchvision.VisionTransformer": ThirdParty("torchvision", VISION, _torchvision_vit),
    "torchvision.SwinTransformer": ThirdParty("torchvision", VISION, _torchvision_swin("")),
    "torchvision.SwinTransformer, V2 blocks": ThirdParty("torchvision", VISION, _torchvision_swin("V2")),
    "torchvision.MaxVit": ThirdParty("torchvision", VISION, _torchvision_maxvit),
    "torchaudio.Conformer": ThirdParty("torchaudio", SOUND, _torchaudio_conformer),
    "torchaudio.Emformer": ThirdParty("torchaudio", SOUND, _torchaudio_emformer),
    "torchaudio.Wav2Vec2Model": ThirdParty("torchaudio", SOUND, _torchaudio_wav2vec2),
    "speechbrain.TransformerASR": ThirdParty("speechbrain", SOUND, _speechbrain("transformer", "regularMHA")),
    "speechbrain.TransformerASR, Conformer": ThirdParty(
        "speechbrain", SOUND, _speechbrain("conformer", "RelPosMHAXL")
    ),
    "speechbrain.TransformerASR, Branchformer": ThirdParty(
        "speechbrain", SOUND, _speechbrain("branchformer", "RelPosMHAXL")
    ),
    "conformer.Conformer": ThirdParty("conformer", SOUND, _conformer),
    "encodec.LMModel": ThirdParty("encodec", SOUND, _encodec),
    "torchtune.TransformerDecoder, Llama 3": ThirdParty("torchtune", GENERATION, _torchtune("llama3")),
    "torchtune.TransformerDecoder, Qwen2": ThirdParty(
        "torchtune", GENERATION, _torchtune("qwen2", intermediate_dim=64)
    ),
    "torchtune.TransformerDecoder, Gemma 2": ThirdParty(
        "torchtune", GENERATION, _torchtune("gemma2", head_dim=8, intermediate_dim=64)
    ),
    "sentence_transformers.SentenceTransformer": ThirdParty(
        "sentence_transformers", ENCODERS, _sentence_transformer
    ),
    "peft.PeftModel, LoRA": ThirdParty(
        "peft",
        GENERATION,
        _peft("LoraConfig", r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False),
    ),
    "peft.PeftModel, IA3": ThirdParty(
        "peft", GENERATION, _peft("IA3Config", target_modules=["k_proj", "v_proj"], feedforward_modules=[])
    ),
    "peft.PeftModel, prefix tuning": ThirdParty(
        "peft", GENERATION, _peft("PrefixTuningConfig", num_virtual_tokens=3)
    ),
    "bitsandbytes.Linear4bit in Llama": ThirdParty("bitsandbytes", GENERATION, _bitsandbytes("Linear4bit")),
    "vit_pytorch.ViT": ThirdParty("vit_pytorch", VISION, _vit_pytorch("vit", "ViT")),
    "vit_pytorch.SimpleViT": ThirdParty("vit_pytorch", VISION, _vit_pytorch("simple_vit", "SimpleViT")),
    "vit_pytorch.DeepViT": ThirdParty("vit_pytorch", VISION, _vit_pytorch("deepvit", "DeepViT")),
    "vit_pytorch.CaiT": ThirdParty("vit_pytorch", VISION, _vit_pytorch("cait", "CaiT", cls_depth=1)),
    "vit_pytorch.T2TViT": ThirdParty(
        "vit_pytorch", VISION, _vit_pytorch("t2t", "T2TViT", patch_size=None, t2t_layers=((7, 4), (3, 2)))
    ),
}
