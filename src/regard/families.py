"""Facts about model families of transformers that their code does not state: one table for the whole package.

`watch`, `intervene` and measures need no entry: they read what a layer calls. A family with its own attention gets an
entry in the table that concerns it:

- `FAMILIES`, by `config.model_type`: how it reads images, how its configuration states windows, and why a policy cache
  cannot serve it. A family that is not listed has the defaults of `Family`.
- `ATTENTION_MODULES`, by the class of its attention module: where the projections are, for `from_transformers` of
  `regard.nn` and `qk_clip` of `regard.monitor`. Add the class to `SUBJECTS` in `tests/parity/models.py`, which compares
  the module with the converted layer, and run `scripts/docs parity --write`; or set `is_convertible=False`.
- `UNSCALED_LAYERS`, by class: its scores have a scale of 1 by design, so `doctor` and `diagnose` do not warn.
- `TESTED_CACHES`, by `config.model_type`, once `tests/unit/policy/test_cache_families.py` serves it.

What the classes of transformers state themselves, such as support for `sdpa`, is read from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Facts about the models of one `config.model_type`.

    Args:
        patches: How a vision model orders its patches: "fixed" for images of one size, row by row; "blocks" for
            patches that it merges to one token; "padded" for rows of patches up to a common length.
        patch_tokens: Names of the tokens before the patches; registers follow them.
        image_sizes: The input of a language model that has the sizes of its images.
        pools_images: Whether it pools the patches of an image to a square.
        windows: Whether its configuration has a window "by layer", or "one" for all layers. Only for families whose
            layers differ in their masks and nothing else.
        own_cache: What a policy cache cannot serve, and the reason.
    """

    patches: Literal["fixed", "blocks", "padded"] | None = None
    patch_tokens: tuple[str, ...] = ()
    image_sizes: Literal["image_grid_thw", "pixel_values"] | None = None
    pools_images: bool = False
    windows: Literal["by layer", "one"] | None = None
    own_cache: tuple[str, str] | None = None


FAMILIES = {
    "clip_vision_model": Family(patches="fixed", patch_tokens=("class",)),
    "deit": Family(patches="fixed", patch_tokens=("class", "distillation")),
    "dinov2": Family(patches="fixed", patch_tokens=("class",)),
    "dinov2_with_registers": Family(patches="fixed", patch_tokens=("class",)),
    "dinov3_vit": Family(patches="fixed", patch_tokens=("class",)),
    "gemma2": Family(windows="by layer"),
    "gemma3": Family(image_sizes="pixel_values", pools_images=True),
    "gpt_oss": Family(windows="by layer"),
    "llava": Family(image_sizes="pixel_values"),
    "minimax": Family(own_cache=("a cache of its own", "it accepts no other class")),
    "ministral": Family(windows="by layer"),
    "mistral": Family(windows="one"),
    "mixtral": Family(windows="one"),
    "mllama_text_model": Family(
        own_cache=("cross-attention in its decoder", "its cross-attention keys have no distance to a query")
    ),
    "paligemma": Family(image_sizes="pixel_values"),
    "phi3": Family(windows="one"),
    "phimoe": Family(windows="one"),
    "qwen2": Family(windows="by layer"),
    "qwen2_5_vl": Family(image_sizes="image_grid_thw"),
    "qwen2_moe": Family(windows="by layer"),
    "qwen2_vl": Family(
        patches="blocks", image_sizes="image_grid_thw"
    ),  # the vision model in early releases, too
    "qwen2_vl_vision": Family(patches="blocks"),
    "qwen3": Family(windows="by layer"),
    "qwen3_vl": Family(patches="blocks", image_sizes="image_grid_thw"),
    "qwen3_vl_vision": Family(patches="blocks"),
    "siglip2_vision_model": Family(patches="padded"),
    "siglip_vision_model": Family(patches="fixed"),
    "starcoder2": Family(windows="one"),
    "vit": Family(patches="fixed", patch_tokens=("class",)),
    "vit_msn": Family(patches="fixed", patch_tokens=("class",)),
    "whisper": Family(
        own_cache=("the decoder of Whisper", "its outputs in chunks were not those of the masks")
    ),
}


def get_family(model_type: str | None) -> Family:
    """Return the facts about a `config.model_type`; the defaults if it is not listed."""
    return FAMILIES.get(model_type or "", Family())


@dataclass(frozen=True)
class AttentionModule:
    """How a class of attention modules stores its weights.

    Args:
        projections: Names of the query, key and value projections, or of the one that holds all three.
        out: Name of the output projection.
        by_head: Whether the one projection stacks query, key and value within each head; with grouped heads, the
            queries, the key and the value of each key head.
        is_rotary: Whether queries and keys are rotated.
        bias: What is added to the scores: ALiBi, or the relative bias of T5.
        inner: Name of the submodule with the scale and the other options; empty for the module itself.
        is_convertible: Whether `from_transformers` converts it.
    """

    projections: tuple[str, ...]
    out: str
    by_head: bool = False
    is_rotary: bool = False
    bias: Literal["alibi", "relative"] | None = None
    inner: str = ""
    is_convertible: bool = True


_LLAMA = AttentionModule(("q_proj", "k_proj", "v_proj"), "o_proj", is_rotary=True)
ATTENTION_MODULES = {
    "BertAttention": AttentionModule(("self.query", "self.key", "self.value"), "output.dense", inner="self"),
    "BrosSelfAttention": AttentionModule(
        ("query", "key", "value"), "", bias="relative", is_convertible=False
    ),
    "BloomAttention": AttentionModule(("query_key_value",), "dense", by_head=True, bias="alibi"),
    "FalconAttention": AttentionModule(
        ("query_key_value",), "dense", by_head=True, is_rotary=True, is_convertible=False
    ),
    "GPT2Attention": AttentionModule(("c_attn",), "c_proj"),
    "GPTBigCodeAttention": AttentionModule(("c_attn",), "c_proj", by_head=True, is_convertible=False),
    "GPTNeoXAttention": AttentionModule(("query_key_value",), "dense", by_head=True, is_rotary=True),
    "Gemma2Attention": _LLAMA,
    "GptOssAttention": _LLAMA,
    "LlamaAttention": _LLAMA,
    "MistralAttention": _LLAMA,
    "ModernBertAttention": AttentionModule(("Wqkv",), "Wo", is_rotary=True, is_convertible=False),
    "MptAttention": AttentionModule(("Wqkv",), "out_proj", bias="alibi"),
    "Phi3Attention": AttentionModule(("qkv_proj",), "o_proj", is_rotary=True, is_convertible=False),
    "Qwen3Attention": _LLAMA,
    "T5Attention": AttentionModule(("q", "k", "v"), "o", bias="relative"),
}

# Names that the projections of query and key have in other classes.
SEPARATE_PROJECTIONS = (("q_proj", "k_proj"), ("query", "key"), ("wq", "wk"))
# Names of projections that compute query, key and value.
FUSED_PROJECTIONS = (
    "c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "in_proj", "to_qkv"
)  # fmt: skip

# Layers of transformers whose scale is 1 by design: the training absorbs it (T5, GPT-Neo), queries and keys are
# normalised (Gemma 3n, Gemma 4), or the layer multiplies the query before the call (Whisper, OPT, ESM).
UNSCALED_LAYERS = re.compile(
    r"((U?M|Long)?T5|SwitchTransformers|Pop2Piano|Udop|Pix2Struct(Text|Vision)|GPTNeo|Gemma3nText|Gemma4\w*|Whisper|OPT"
    r"|Esm)(Self|Local|TransientGlobal)?Attention"
)

# Families whose outputs with a policy cache were compared with those of the policy as masks.
# fmt: off
TESTED_CACHES = frozenset({
    "afmoe", "apertus", "arcee", "bart", "beam", "bert", "bert-generation", "biogpt", "bitnet", "blenderbot",
    "blenderbot-small", "camembert", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "data2vec-text",
    "electra", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "fuyu",
    "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "got_ocr2", "gpt2", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "kolibri1", "lfm2", "llama",
    "llama4_text", "marian", "mbart", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
    "mistral", "mixtral", "modernbert-decoder", "moshi", "moss_transcribe_diarize", "nanochat", "nemotron_h",
    "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "pegasus", "persimmon", "phi", "phi3",
    "phi4_multimodal", "phimoe", "plbart", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "roberta", "roberta-prelayernorm", "roc_bert", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2", "vaultgemma", "xlm-roberta", "xlm-roberta-xl",
})
# fmt: on
