"""Patch grids: the token of each patch is the one that changes with its pixels, in real models of each family."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import nn

import regard
from regard.errors import ArgumentError, IndexOutOfRangeError, NotCapturedError
from regard.images import PatchGrid, read_grids
from tests.helpers.images import draw_image
from tests.helpers.vision_models import IMAGE_ID, build_qwen2_vl, build_vision_model

SPECIAL = {
    "ViT": ("class",),
    "DINOv2": ("class", *(f"register {i}" for i in range(1, 5))),
    "DINOv3": ("class", *(f"register {i}" for i in range(1, 5))),
    "CLIP": ("class",),
    "SigLIP": (),
}


def changed_tokens(model, layer: str, inputs: dict, others: dict) -> np.ndarray:
    """Return which tokens differ between two inputs where a layer reads them, (calls, batch, tokens)."""
    seen: list[torch.Tensor] = []

    def keep(_, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append(hidden.reshape(-1, *hidden.shape[-2:]))

    handle = model.get_submodule(layer).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
        model(**others)
    handle.remove()
    first, second = seen
    return (first != second).any(-1).numpy()


@pytest.mark.parametrize("family", SPECIAL)
def test_the_token_of_a_patch_changes_with_its_pixels(family):
    model, inputs, layer = build_vision_model(family)
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    height, width = inputs["pixel_values"].shape[-2:]
    for batch in (0, 1):
        [grid] = recording.grids(layer, batch=batch)
        assert (grid.rows, grid.columns) == (height // 8, width // 8)
        assert (grid.names, grid.before, grid.after) == (SPECIAL[family], len(SPECIAL[family]), 0)
        assert grid.length == recording[layer].shape[-1]
    for row, column in [(0, 0), (1, 2), (grid.rows - 1, grid.columns - 1)]:
        pixels = inputs["pixel_values"].clone()
        pixels[1, :, 8 * row + 3, 8 * column + 5] += 1
        changed = changed_tokens(model, layer, inputs, {**inputs, "pixel_values": pixels})
        assert np.argwhere(changed).tolist() == [[1, grid.positions[row, column]]]
    assert read_grids(getattr(model.config, "vision_config", model.config), inputs)[1] == [grid]


def test_two_images_of_different_sizes_in_a_batch_of_qwen2_vl():
    model, inputs, layer = build_qwen2_vl()
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    length = inputs["input_ids"].shape[1]
    sizes = [(2, 4), (3, 2)]  # 32 × 64 and 48 × 32 pixels, patches of 8, merged in blocks of 2 × 2
    for batch, (rows, columns) in enumerate(sizes):
        before = inputs["input_ids"][batch].tolist().index(IMAGE_ID)
        [grid] = recording.grids(layer, batch=batch)
        assert grid == PatchGrid(rows, columns, before=before, after=length - before - rows * columns)
        [vision] = recording.grids("model.visual.blocks.1.attn", batch=batch)
        assert vision == PatchGrid(2 * rows, 2 * columns, block=2)
        assert read_grids(model.config, inputs)[batch] == [grid]
        assert read_grids(model.config.vision_config, inputs)[batch] == [vision]
    with pytest.raises(IndexOutOfRangeError, match="2 batch entries"):
        recording.grids(layer, batch=2)


@pytest.mark.parametrize(
    ("depth", "layer"), [(1, "model.visual.blocks.0"), (0, "model.language_model.layers.0")]
)
def test_patches_of_qwen2_vl_change_with_their_pixels(depth, layer):
    images = [draw_image(32, 64), draw_image(48, 32)]
    model, inputs, _ = build_qwen2_vl(depth, images)
    config, edge = (model.config.vision_config, 8) if depth else (model.config, 16)
    grids = [grid for entry in read_grids(config, inputs) for grid in entry]
    for image, row, column in [(0, 0, 0), (0, 1, 3), (1, 0, 1), (1, 2, 1)]:
        other = [picture.copy() for picture in images]
        other[image][edge * row + 2, edge * column + 5] ^= 255
        changed = changed_tokens(model, layer, inputs, build_qwen2_vl(depth, other).inputs)
        token = grids[image].positions[row, column]
        # The vision model reads all patches in one sequence, the language model each image in its own batch entry.
        expected = [0, token + image * grids[0].length] if depth else [image, token]
        assert np.argwhere(changed).tolist() == [expected]


def test_grids_stay_while_a_sequence_grows_and_in_a_file(tmp_path):
    model, inputs, layer = build_qwen2_vl()
    with torch.no_grad(), regard.watch(model) as recording:
        model.generate(**inputs, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    [grid] = recording.grids(layer, batch=1)
    assert grid.length == recording[layer].shape[-1] == inputs["input_ids"].shape[1] + 3
    recording.save(tmp_path / "recording.safetensors")
    again = regard.load_recording(tmp_path / "recording.safetensors")
    assert again.grids(layer, batch=1) == [grid]
    assert again.grids("model.visual.blocks.0.attn") == recording.grids("model.visual.blocks.0.attn")


# -- Refusals -----------------------------------------------------------------------------------------------


def test_a_grid_that_does_not_fit_is_refused_with_both_numbers():
    model, inputs, layer = build_vision_model("DINOv2")
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)  # 4 × 6 patches, where the configuration has 4 × 4
    assert recording[layer].shape[-1] == 29
    [[grid]] = read_grids(model.config)
    assert grid.length == 21
    with pytest.raises(
        ArgumentError, match=r"29 weights for a grid of 21 tokens: 4 × 4 patches, 5 tokens before"
    ):
        grid.to_map(recording[layer][0, 0, 0])
    recording._module_hints.image_passes[""][0].grids[0] = [grid]
    with pytest.raises(
        ArgumentError, match=r"29 keys of 'encoder.layer.0.attention' for a grid of 21 tokens"
    ):
        recording.grids(layer)


def test_image_tokens_that_are_not_the_patches_are_refused():
    model, inputs, _ = build_qwen2_vl()
    ids = inputs["input_ids"].clone()
    ids[0, -1] = IMAGE_ID
    with pytest.raises(ArgumentError, match=r"15 image tokens in input_ids for 14 patches \(2 × 4, 3 × 2\)"):
        read_grids(model.config, {**inputs, "input_ids": ids})
    ids[0, 3] = 5  # as many as patches again, with a gap
    with pytest.raises(ArgumentError, match="not consecutive"):
        read_grids(model.config, {**inputs, "input_ids": ids})
    for name in ("input_ids", "image_grid_thw"):
        with pytest.raises(ArgumentError, match=f"inputs without {name}"):
            read_grids(model.config, {**inputs, name: None})
    video = torch.tensor([[2, 4, 8], [1, 6, 4]])
    with pytest.raises(ArgumentError, match="2 frames"):
        read_grids(model.config.vision_config, {"image_grid_thw": video})
    with pytest.raises(ArgumentError, match="one row for each image"):
        read_grids(model.config.vision_config, {"image_grid_thw": torch.tensor([1, 4, 8])})


def test_unknown_models_and_layers_without_images_are_refused():
    model, inputs, layer = build_vision_model("CLIP")
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    with pytest.raises(NotCapturedError, match="not part of a model whose patch grid is known"):
        recording.grids("text_model.encoder.layers.0.self_attn")
    with pytest.raises(ArgumentError, match="whose text has no image tokens"):
        read_grids(model.config, inputs)
    model.config.vision_config.model_type = "other"
    with pytest.raises(ArgumentError, match=r"model_type='other'.*PatchGrid\(rows, columns"):
        read_grids(model.config.vision_config)
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    with pytest.raises(ArgumentError, match=r"grid is unknown: .*model_type='other'"):
        recording.grids(layer)


def test_images_of_several_passes_are_refused():
    model, inputs, layer = build_vision_model("SigLIP")
    with torch.no_grad(), regard.watch(model.vision_model) as recording:
        for _ in range(2):
            model.vision_model(inputs["pixel_values"])
    with pytest.raises(ArgumentError, match=r"2 passes of .* with images"):
        recording.grids(layer.removeprefix("vision_model."))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0, "columns": 2}, "rows=0"),
        ({"rows": 2, "columns": 2.5}, "columns=2.5"),
        ({"rows": 2, "columns": 2, "names": ("class",)}, "1 names for 0 tokens"),
        ({"rows": 3, "columns": 2, "block": 2}, "3 × 2 patches in blocks of 2 × 2"),
    ],
)
def test_wrong_grids_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        PatchGrid(**arguments)


def build_other_qwen(version: str, images: list[np.ndarray]):
    """Build Qwen2.5-VL or Qwen3-VL without layers in its vision model, with the inputs of Qwen2-VL."""
    import transformers as hf

    model, inputs, layer = build_qwen2_vl(0, images)
    vision = {
        "depth": 0,
        "num_heads": 4,
        "patch_size": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
    }
    name = {"2.5": "Qwen2_5_VL", "3": "Qwen3VL"}[version]
    if version == "3":
        vision |= {"deepstack_visual_indexes": [], "num_position_embeddings": 64}
    text = model.config.text_config.to_dict() | {"head_dim": 8}
    text.pop("model_type")
    ids = {
        key: getattr(model.config, key)
        for key in ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    }
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=vision, video_token_id=91, **ids)
    torch.manual_seed(0)
    return getattr(hf, f"{name}ForConditionalGeneration")(config).eval(), inputs, layer


@pytest.mark.parametrize("version", ["2.5", "3"])
def test_patches_of_other_qwen_models_change_with_their_pixels(version):
    images = [draw_image(32, 64), draw_image(48, 32)]
    model, inputs, layer = build_other_qwen(version, images)
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    for image, row, column in [(0, 1, 2), (1, 2, 0)]:
        other = [picture.copy() for picture in images]
        other[image][16 * row + 2, 16 * column + 5] ^= 255
        inputs_of_other = build_qwen2_vl(0, other).inputs
        changed = changed_tokens(model, layer.removesuffix(".self_attn"), inputs, inputs_of_other)
        [grid] = recording.grids(layer, batch=image)
        assert np.argwhere(changed).tolist() == [[image, grid.positions[row, column]]]


def test_padded_patches_of_siglip_2():
    import transformers as hf

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**sizes, patch_size=4, num_patches=16)).eval()
    shapes = torch.tensor([[2, 4], [3, 3]])
    inputs = {
        "pixel_values": torch.rand(2, 12, 48),
        "pixel_attention_mask": (torch.arange(12) < shapes.prod(1, keepdim=True)).long(),
        "spatial_shapes": shapes,
    }
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    layer = next(iter(recording))
    assert recording.grids(layer) == [PatchGrid(2, 4, after=4)]
    assert recording.grids(layer, batch=1) == [PatchGrid(3, 3, after=3)]
    assert read_grids(model.config, inputs) == [[PatchGrid(2, 4, after=4)], [PatchGrid(3, 3, after=3)]]


# -- Other models -------------------------------------------------------------------------------------------


def test_other_models_of_the_table():
    import transformers as hf

    from tests.helpers.healthy_models import HEALTHY

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    pixels = torch.zeros(1, 3, 16, 16)
    for name, config in [
        ("ViTMSNModel", hf.ViTMSNConfig),
        ("DeiTModel", hf.DeiTConfig),
        ("Dinov2Model", hf.Dinov2Config),
    ]:
        model = getattr(hf, name)(config(**sizes, image_size=16, patch_size=8)).eval()
        with torch.no_grad(), regard.watch(model) as recording:
            model(pixels)
        [grid] = recording.grids(next(iter(recording)))
        assert grid.num_patches == 4 and grid.names[0] == "class"
    for name in ("LLaVA", "PaliGemma", "Gemma 3"):
        model, inputs = HEALTHY[name]()
        with torch.no_grad(), regard.watch(model) as recording:
            model(**inputs)
        layer = next(layer for layer in recording if "language_model" in layer)
        [grid] = recording.grids(layer)
        assert (grid.rows, grid.columns, grid.before) == (2, 2, 3)


class Patches(nn.Module):
    """A patch embedding with the attributes that timm gives it."""

    grid_size = (2, 3)

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, 8, 4, 4)

    def dynamic_feat_size(self, size):
        return size[0] // 4, size[1] // 4

    def forward(self, x):
        return self.proj(x).flatten(2).mT


class TimmModel(nn.Module):
    """Attention over a class token, two registers and patches, in the order of timm."""

    num_prefix_tokens = 3

    def __init__(self):
        super().__init__()
        self.patch_embed, self.attn = Patches(), nn.MultiheadAttention(8, 2, batch_first=True)
        self.cls_token, self.dist_token = nn.Parameter(torch.randn(1, 1, 8)), None

    def forward(self, x):
        first = torch.cat([self.cls_token, torch.ones(1, 2, 8)], 1).expand(len(x), -1, -1)
        tokens = torch.cat([first, self.patch_embed(x)], 1)
        return self.attn(tokens, tokens, tokens)[0]


def test_the_grid_of_a_model_of_timm_is_read_from_its_patch_embedding():
    model, names = TimmModel().eval(), ("class", "register 1", "register 2")
    assert read_grids(model) == [[PatchGrid(2, 3, before=3, names=names)]]
    with torch.no_grad(), regard.watch(model) as recording:
        model(torch.randn(2, 3, 12, 16))  # not the size that the model was built for
    for batch in (0, 1):
        assert recording.grids("attn", batch=batch) == [PatchGrid(3, 4, before=3, names=names)]
    model.num_prefix_tokens = 1
    with torch.no_grad(), regard.watch(model) as recording:
        model(torch.randn(2, 3, 12, 16))
    with pytest.raises(ArgumentError, match="15 keys of 'attn' for a grid of 13 tokens"):
        recording.grids("attn")
