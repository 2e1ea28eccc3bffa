"""Tiny models that read images, and their inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf

from tests.helpers.images import draw_image

IMAGE_ID = 90
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = {**_SIZES, "vocab_size": 97, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
_VISION = {**_SIZES, "image_size": 32, "patch_size": 8}


class VisionModel(NamedTuple):
    """A model, its inputs, and the first attention layer whose keys include patches."""

    model: Any
    inputs: dict[str, Any]
    layer: str


def _build(model_class: type, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class._from_config(config).eval()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.1)
    return model


def to_pixel_values(*images: np.ndarray) -> torch.Tensor:
    """Return images of one size as (images, 3, height, width), normalised as SigLIP's processor does."""
    return torch.stack([torch.tensor(image).permute(2, 0, 1) / 127.5 - 1 for image in images])


def build_vision_model(family: str, height: int = 32, width: int = 48) -> VisionModel:
    """Build a vision model and inputs of two images; DINO takes any size, the others that of their configuration."""
    images = [draw_image(height, width), draw_image(height, width)[::-1].copy()]
    inputs = {"pixel_values": to_pixel_values(*images)}
    size = {**_VISION, "image_size": (height, width)}
    if family == "ViT":
        return VisionModel(
            _build(hf.ViTForImageClassification, hf.ViTConfig(**size)), inputs, "vit.layers.0.attention"
        )
    if family == "DINOv2":
        config = hf.Dinov2WithRegistersConfig(**_VISION, num_register_tokens=4)
        return VisionModel(_build(hf.Dinov2WithRegistersModel, config), inputs, "encoder.layer.0.attention")
    if family == "DINOv3":
        config = hf.DINOv3ViTConfig(**_VISION, num_register_tokens=4)
        return VisionModel(_build(hf.DINOv3ViTModel, config), inputs, "model.layer.0.attention")
    inputs = {
        "pixel_values": to_pixel_values(*(draw_image(32, 32), draw_image(32, 32)[::-1].copy())),
        "input_ids": torch.arange(14).reshape(2, 7) + 3,
    }
    layer = "vision_model.encoder.layers.0.self_attn"
    if family == "CLIP":
        config = hf.CLIPConfig(text_config=_TEXT, vision_config=_VISION, projection_dim=16)
        return VisionModel(_build(hf.CLIPModel, config), inputs, layer)
    assert family == "SigLIP"
    config = hf.SiglipConfig(text_config={**_TEXT, "max_position_embeddings": 16}, vision_config=_VISION)
    return VisionModel(_build(hf.SiglipModel, config), inputs, layer)


def build_qwen2_vl(depth: int = 2, images: list[np.ndarray] | None = None) -> VisionModel:
    """Build Qwen2-VL and a batch of two texts, each with an image of another size in it, padded on the left.

    The image sizes come from the processor of transformers.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    ids = {"video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    vision = {
        "depth": depth, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 1, "patch_size": 8,
        "temporal_patch_size": 2, "spatial_merge_size": 2,
    }  # fmt: skip
    config = hf.Qwen2VLConfig(
        text_config={**_TEXT, "num_key_value_heads": 2, "rope_parameters": rope}, vision_config=vision,
        image_token_id=IMAGE_ID, **ids,
    )  # fmt: skip
    limits = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    processor = hf.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=limits)
    images = [draw_image(32, 64), draw_image(48, 32)] if images is None else images
    inputs = dict(processor(images, return_tensors="pt"))
    texts = [([5, 6, 92], [93, 7, 8, 9]), ([11, 92], [93, 12])]
    rows = [
        before + [IMAGE_ID] * int(size.prod() // 4) + after
        for (before, after), size in zip(texts, inputs["image_grid_thw"], strict=True)
    ]
    longest = max(map(len, rows))
    inputs["input_ids"] = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    inputs["attention_mask"] = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_ID).long()
    model = _build(hf.Qwen2VLForConditionalGeneration, config)
    return VisionModel(model, inputs, "model.language_model.layers.0.self_attn")
