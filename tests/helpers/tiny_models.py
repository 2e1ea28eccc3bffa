"""Tiny models of twelve architectures, their inputs, and their weights by eager attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers as hf


class TinyModel(NamedTuple):
    model_class: type
    config: Any
    input_kind: str = "tokens"  # or "pixels", "audio", "pairs" (encoder and decoder)
    pads: bool = True
    generates: bool = True
    implementation: str | None = None  # of attention; default: of transformers

    def build(self, implementation: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """Build the model in eval mode, with large weights that do not depend on the implementation."""
        torch.manual_seed(0)
        config = type(self.config).from_dict(self.config.to_dict())
        implementation = implementation or self.implementation
        options = {} if implementation is None else {"attn_implementation": implementation}
        if hasattr(config, "num_experts_per_tok"):
            options["experts_implementation"] = "eager"  # the grouped product does not support float64
        model = self.model_class._from_config(config, **options).eval()
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.1)
        return model.to(dtype)

    def inputs(self, side: str, batch: int = 2) -> dict[str, Any]:
        """Build inputs of `batch` entries, the last one padded on a side ("none" for no padding)."""
        seed = torch.Generator().manual_seed(1)
        if self.input_kind == "pixels":
            return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=seed)}
        decoded = {"decoder_input_ids": torch.randint(3, 61, (batch, 7), generator=seed)}
        if self.input_kind == "audio":
            return {"input_features": torch.randn(batch, 8, 20, generator=seed), **decoded}
        real = torch.ones(batch, 11, dtype=torch.long)
        if side != "none":
            real[-1, slice(4) if side == "left" else slice(-4, None)] = 0
        tokens = torch.randint(3, 61, (batch, 11), generator=seed) * real
        inputs = {"input_ids": tokens, "attention_mask": real}
        return {**inputs, **decoded} if self.input_kind == "pairs" else inputs


def _sizes(**more: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {**sizes, **more}


_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_PAIRS = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

TINY = {
    "GPT-2": TinyModel(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    "BERT": TinyModel(hf.BertModel, hf.BertConfig(**_sizes()), generates=False),
    "Llama": TinyModel(hf.LlamaForCausalLM, hf.LlamaConfig(**_sizes(**_GROUPED))),
    "Mistral": TinyModel(hf.MistralForCausalLM, hf.MistralConfig(**_sizes(**_GROUPED, sliding_window=5))),
    "Qwen3": TinyModel(hf.Qwen3ForCausalLM, hf.Qwen3Config(**_sizes(**_GROUPED))),
    "T5": TinyModel(
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
            relative_attention_max_distance=12, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        ),
        input_kind="pairs",
    ),
    "BART": TinyModel(
        hf.BartForConditionalGeneration,
        hf.BartConfig(**_PAIRS, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None),
        input_kind="pairs",
    ),
    "ViT": TinyModel(
        hf.ViTModel,
        hf.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=12,
            patch_size=4,
        ),
        input_kind="pixels",
        pads=False,
        generates=False,
    ),
    "Whisper": TinyModel(
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            **_PAIRS, num_mel_bins=8, max_source_positions=10, max_target_positions=32, decoder_start_token_id=3,
            begin_suppress_tokens=None, suppress_tokens=None,
        ),
        input_kind="audio",
        pads=False,
    ),
    "DeepSeek-V3": TinyModel(
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            **_sizes(num_key_value_heads=4), q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
            v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
            moe_intermediate_size=16, first_k_dense_replace=1,
        ),
    ),
    "Gemma 2": TinyModel(
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            **_sizes(**_GROUPED), query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=20.0
        ),
        implementation="eager",  # in 5.0 and 5.10 the default is SDPA, which drops the soft cap
    ),
    "GPT-OSS": TinyModel(
        hf.GptOssForCausalLM,
        hf.GptOssConfig(
            **_sizes(**_GROUPED), sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
}  # fmt: skip

# In transformers 5.0 and 5.10 T5 computes its own softmax: the lens reads its weights, and no query, key or bias.
needs_t5_attention = pytest.mark.skipif(
    not hf.T5ForConditionalGeneration._supports_sdpa, reason="T5 of this release computes its own softmax"
)


@contextmanager
def softmax_in_own_dtype() -> Iterator[None]:
    """Compute softmaxes in the dtype of their input; many models compute them in float32 whatever their dtype."""
    softmax = torch.nn.functional.softmax
    with mock.patch.object(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim)):
        yield


def output_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output, in order."""
    return [value for value in output.to_tuple() if isinstance(value, torch.Tensor)]


def eager_weights(output: Any) -> list[torch.Tensor]:
    """Return the weights of `output_attentions=True`, in the order in which the layers run."""
    if getattr(output, "decoder_attentions", None) is None:
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(weights for pair in pairs for weights in pair)]


def list_functions() -> dict[str, Any]:
    """List every function that a watch may patch: of transformers' registry, its modelling files, and torch."""
    functions = {f"registry {name}": value for name, value in hf.AttentionInterface._global_mapping.items()}
    for file, module in tuple(sys.modules.items()):
        if file.startswith("transformers.models.") and ".modeling_" in file:
            functions |= {f"{file}.{name}": value for name, value in vars(module).items() if callable(value)}
    functional = torch.nn.functional
    functions["sdpa"] = functional.scaled_dot_product_attention
    functions["mha"] = functional.multi_head_attention_forward
    return functions
