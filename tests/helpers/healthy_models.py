"""`HEALTHY`: tiny models of more than sixty architectures with their inputs, none of which has a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.helpers.planted_transformers import MODELS, add_lora
from tests.helpers.tiny_models import TINY

Build = Callable[[], tuple[Any, dict[str, Any]]]

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
IMAGE_ID = 90


def _ids(batch: int = 2, tokens: int = 14) -> torch.Tensor:
    return torch.randint(3, 80, (batch, tokens), generator=torch.Generator().manual_seed(5))


def _pixels(batch: int = 1, side: int = 16) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(6))


def _build(model_class: Any, config: Any, **options: Any) -> Any:
    """Build a model of transformers in eval mode."""
    torch.manual_seed(0)
    return _enlarge(model_class._from_config(config, **options).eval())


def _enlarge(model: Any) -> Any:
    """Add noise to the weights, so that they matter."""
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.1)
    return model


def _text(model_class: str, config_class: str, **options: Any) -> Build:
    """A model of text, run on a batch without padding."""

    def build() -> tuple[Any, dict[str, Any]]:
        config = getattr(hf, config_class)(**{**SIZES, **options})
        return _build(getattr(hf, model_class), config), {"input_ids": _ids()}

    return build


def _tiny(name: str, side: str = "right") -> Build:
    def build() -> tuple[Any, dict[str, Any]]:
        return TINY[name].build(), TINY[name].inputs(side if TINY[name].pads else "none")

    return build


def _image_ids(num_images: int) -> torch.Tensor:
    """Tokens with an image after the third."""
    ids = _ids(1)
    return torch.cat([ids[:, :3], torch.full((1, num_images), IMAGE_ID), ids[:, 3:]], 1)


def _clip() -> tuple[Any, dict[str, Any]]:
    config = hf.CLIPConfig(text_config=SIZES, vision_config=VISION, projection_dim=16)
    return _build(hf.CLIPModel, config), {"input_ids": _ids(), "pixel_values": _pixels(2)}


def _gemma3() -> tuple[Any, dict[str, Any]]:
    text = SIZES | GROUPED | {"head_dim": 8, "sliding_window": 32}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    config = hf.Gemma3Config(
        text_config=text, vision_config=VISION | {"vision_use_head": False}, mm_tokens_per_image=4,
        image_token_id=IMAGE_ID, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    ids = _image_ids(4)
    inputs = {"input_ids": ids, "pixel_values": _pixels(), "token_type_ids": (ids == IMAGE_ID).long()}
    return _build(hf.Gemma3ForConditionalGeneration, config), inputs


def _llava() -> tuple[Any, dict[str, Any]]:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**SIZES), vision_config=hf.CLIPVisionConfig(**VISION), image_token_index=IMAGE_ID,
        image_token_id=IMAGE_ID, vision_feature_layer=-1,
    )  # fmt: skip
    return _build(hf.LlavaForConditionalGeneration, config), {
        "input_ids": _image_ids(4), "pixel_values": _pixels(),
    }  # fmt: skip


def _paligemma() -> tuple[Any, dict[str, Any]]:
    text = hf.GemmaConfig(**SIZES | GROUPED | {"head_dim": 8})
    config = hf.PaliGemmaConfig(
        text_config=text, vision_config=hf.SiglipVisionConfig(**VISION, vision_use_head=False), projection_dim=32,
        image_token_index=IMAGE_ID, image_token_id=IMAGE_ID,
    )  # fmt: skip
    inputs = {"input_ids": _image_ids(4), "pixel_values": _pixels()}
    inputs |= {
        "attention_mask": torch.ones_like(inputs["input_ids"]),
        "token_type_ids": torch.zeros_like(inputs["input_ids"]),
    }
    return _build(hf.PaliGemmaForConditionalGeneration, config), inputs


def _qwen2_vl() -> tuple[Any, dict[str, Any]]:
    text = SIZES | GROUPED | {
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    }  # fmt: skip
    vision = {
        "depth": 1, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "mlp_ratio": 1, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    ids = {
        "image_token_id": IMAGE_ID,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    }
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    model = _build(hf.Qwen2VLForConditionalGeneration, config)
    tokens = _image_ids(4)
    tokens[0, 2] = 92
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(6))
    inputs = {"input_ids": tokens, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    inputs["mm_token_type_ids"] = (tokens == IMAGE_ID).long()
    return model, inputs


def _idefics3() -> tuple[Any, dict[str, Any]]:
    config = hf.Idefics3Config(
        text_config=hf.LlamaConfig(**SIZES), vision_config=VISION, image_token_id=IMAGE_ID, scale_factor=2
    )
    return _build(hf.Idefics3ForConditionalGeneration, config), {
        "input_ids": _image_ids(1), "pixel_values": _pixels()[:, None],
    }  # fmt: skip


def _vision(model_class: str, config_class: str) -> Build:
    def build() -> tuple[Any, dict[str, Any]]:
        config = getattr(hf, config_class)(**VISION)
        return _build(getattr(hf, model_class), config), {"pixel_values": _pixels(2)}

    return build


def _tiny_variant(name: str) -> Build:
    return lambda: (MODELS[name].build(), MODELS[name].inputs("right"))


def _rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **options}}


def _pairs(model_class: str, config_class: str, **options: Any) -> Build:
    """An encoder-decoder of text, with the sizes of BART, run on a padded batch."""

    def build() -> tuple[Any, dict[str, Any]]:
        sizes = {
            "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
        }  # fmt: skip
        shared = {
            name: SIZES[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
        }
        config = getattr(hf, config_class)(**shared | sizes | options)
        return _build(getattr(hf, model_class), config), TINY["BART"].inputs("right")

    return build


def _swin() -> tuple[Any, dict[str, Any]]:
    config = hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return _build(hf.SwinModel, config), {"pixel_values": _pixels(2, 32)}


def _timm(name: str, **options: Any) -> Build:
    """A model of timm."""

    def build() -> tuple[Any, dict[str, Any]]:
        import timm

        torch.manual_seed(0)
        model = _enlarge(timm.create_model(name, num_classes=5, **options).eval())
        return model, {"x": _pixels(2, options["img_size"])}

    return build


def _lora() -> tuple[Any, dict[str, Any]]:
    return add_lora(merged=False)(), TINY["Llama"].inputs("right")


HEALTHY: dict[str, Build] = {
    **{name: _tiny(name) for name in TINY},
    "GPT-NeoX": _text("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "Qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "Gemma": _text("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=8),
    "Mixtral": _text("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4),
    "RoBERTa": _text("RobertaModel", "RobertaConfig"),
    "ELECTRA": _text("ElectraModel", "ElectraConfig", embedding_size=32),
    "Phi": _text("PhiForCausalLM", "PhiConfig"),
    "Phi-3": _text("Phi3ForCausalLM", "Phi3Config", **GROUPED),
    "Falcon": _text("FalconForCausalLM", "FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
    "OPT": _text("OPTForCausalLM", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "StableLM": _text("StableLmForCausalLM", "StableLmConfig", **GROUPED),
    "Cohere": _text("CohereForCausalLM", "CohereConfig", **GROUPED),
    "OLMo 2": _text("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    "Granite": _text("GraniteForCausalLM", "GraniteConfig", **GROUPED, attention_multiplier=0.25),
    "StarCoder 2": _text("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED),
    "SmolLM 3": _text("SmolLM3ForCausalLM", "SmolLM3Config", **GROUPED),
    "ModernBERT": _text("ModernBertModel", "ModernBertConfig", local_attention=8, num_hidden_layers=4),
    "GPT-J": _text("GPTJForCausalLM", "GPTJConfig", n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "BLOOM": _text("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4),
    "Jamba": _text(
        "JambaForCausalLM",
        "JambaConfig",
        **GROUPED,
        attn_layer_offset=1,
        attn_layer_period=2,
        num_experts=2,
        use_mamba_kernels=False,
    ),
    "Llama 4": _text(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        **GROUPED,
        head_dim=8,
        num_local_experts=2,
        num_hidden_layers=4,
        intermediate_size_mlp=48,
        attention_chunk_size=8,
        no_rope_layers=[1, 1, 1, 0],
    ),
    "Cohere 2": _text(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        **GROUPED,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "HunYuan": _text("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", **GROUPED, head_dim=8),
    "Gemma 3 of text": _text(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **GROUPED,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "MPT": _text("MptForCausalLM", "MptConfig", d_model=32, n_heads=4, n_layers=2, expansion_ratio=2),
    "GPT-Neo": _text(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        num_layers=2,
        num_heads=4,
        window_size=6,
        attention_types=[[["global", "local"], 1]],
    ),
    "GPT-BigCode": _text(
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig", n_embd=32, n_layer=2, n_head=4, n_inner=48
    ),
    "Qwen3 MoE": _text(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **GROUPED,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
    "OLMoE": _text("OlmoeForCausalLM", "OlmoeConfig", **GROUPED, num_experts=4, num_experts_per_tok=2),
    "Zamba 2": _text(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        num_key_value_heads=4,
        mamba_d_state=8,
        mamba_expand=2,
        n_mamba_heads=4,
        mamba_ngroups=1,
        chunk_size=8,
        num_hidden_layers=3,
        layers_block_type=["mamba", "mamba", "hybrid"],
        num_mem_blocks=1,
        use_mem_eff_path=False,
        adapter_rank=4,
    ),
    "Falcon-H1": _text(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        **GROUPED,
        head_dim=8,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    "Qwen3-Next": _text(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        **GROUPED,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Llama with llama3 scaling": _tiny_variant("Llama with llama3 scaling"),
    "Llama with YaRN": _tiny_variant("Llama with YaRN"),
    "Llama with linear scaling": _text(
        "LlamaForCausalLM", "LlamaConfig", **GROUPED, **_rope("linear", factor=4.0)
    ),
    "Llama with dynamic scaling": _text(
        "LlamaForCausalLM", "LlamaConfig", **GROUPED, **_rope("dynamic", factor=4.0)
    ),
    "Phi-3 with longrope": _text(
        "Phi3ForCausalLM",
        "Phi3Config",
        **GROUPED,
        original_max_position_embeddings=32,
        **_rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
            factor=2.0,
            original_max_position_embeddings=32,
        ),
    ),
    "DistilBERT": _text("DistilBertModel", "DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "ALBERT": _text("AlbertModel", "AlbertConfig", embedding_size=16),
    "DeBERTa v2": _text(
        "DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "Pegasus": _pairs("PegasusForConditionalGeneration", "PegasusConfig"),
    "mBART": _pairs("MBartForConditionalGeneration", "MBartConfig"),
    "LED": _pairs("LEDForConditionalGeneration", "LEDConfig", attention_window=4),
    "DINOv2": _vision("Dinov2Model", "Dinov2Config"),
    "Swin": _swin,
    "CLIP": _clip,
    # Models of other packages
    "timm ViT": _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=4),
    "timm Swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1, 1, 1), embed_dim=16, num_heads=(1, 2, 2, 4)
    ),
    "timm EVA-02": _timm("eva02_tiny_patch14_224", img_size=28, depth=2, embed_dim=32, num_heads=4),
    "Llama with LoRA": _lora,
    # Models that read images and text
    "Gemma 3": _gemma3,
    "LLaVA": _llava,
    "PaliGemma": _paligemma,
    "Qwen2-VL": _qwen2_vl,
    "Idefics 3": _idefics3,
}
VISION_LANGUAGE = ("Gemma 3", "LLaVA", "PaliGemma", "Qwen2-VL", "Idefics 3")
REQUIRES = {"Llama with LoRA": "peft"} | {name: "timm" for name in HEALTHY if name.startswith("timm")}
