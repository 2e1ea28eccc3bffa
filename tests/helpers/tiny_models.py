"""Tiny models of the architectures that the lens is held against, their inputs, and their weights by other means."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import transformers as hf


class Tiny(NamedTuple):
    kind: type
    config: Any
    takes: str = "tokens"  # or "pixels", "sound", "pairs" (encoder and decoder)
    pads: bool = True
    generates: bool = True

    def build(self, implementation: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """The model, in eval; the same weights whatever the implementation, large enough to be told apart."""
        torch.manual_seed(0)
        config = type(self.config).from_dict(self.config.to_dict())
        chosen = {} if implementation is None else {"attn_implementation": implementation}
        if hasattr(config, "num_experts_per_tok"):
            chosen["experts_implementation"] = "eager"  # the grouped product knows no float64
        model = self.kind._from_config(config, **chosen).eval()
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.1)
        return model.to(dtype)

    def inputs(self, side: str, batch: int = 2) -> dict[str, Any]:
        """Inputs of `batch` entries, the last one padded on a side ("none" for no padding)."""
        seed = torch.Generator().manual_seed(1)
        if self.takes == "pixels":
            return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=seed)}
        decoded = {"decoder_input_ids": torch.randint(3, 61, (batch, 7), generator=seed)}
        if self.takes == "sound":
            return {"input_features": torch.randn(batch, 8, 20, generator=seed), **decoded}
        real = torch.ones(batch, 11, dtype=torch.long)
        if side != "none":
            real[-1, slice(4) if side == "left" else slice(-4, None)] = 0
        tokens = torch.randint(3, 61, (batch, 11), generator=seed) * real
        given = {"input_ids": tokens, "attention_mask": real}
        return {**given, **decoded} if self.takes == "pairs" else given


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
    "GPT-2": Tiny(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    "BERT": Tiny(hf.BertModel, hf.BertConfig(**_sizes()), generates=False),
    "Llama": Tiny(hf.LlamaForCausalLM, hf.LlamaConfig(**_sizes(**_GROUPED))),
    "Mistral": Tiny(hf.MistralForCausalLM, hf.MistralConfig(**_sizes(**_GROUPED, sliding_window=5))),
    "Qwen3": Tiny(hf.Qwen3ForCausalLM, hf.Qwen3Config(**_sizes(**_GROUPED))),
    "T5": Tiny(
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
            relative_attention_max_distance=12, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        ),
        takes="pairs",
    ),
    "BART": Tiny(
        hf.BartForConditionalGeneration,
        hf.BartConfig(**_PAIRS, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None),
        takes="pairs",
    ),
    "ViT": Tiny(
        hf.ViTModel,
        hf.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=12,
            patch_size=4,
        ),
        takes="pixels",
        pads=False,
        generates=False,
    ),
    "Whisper": Tiny(
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            **_PAIRS, num_mel_bins=8, max_source_positions=10, max_target_positions=32, decoder_start_token_id=3,
            begin_suppress_tokens=None, suppress_tokens=None,
        ),
        takes="sound",
        pads=False,
    ),
    "DeepSeek-V3": Tiny(
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            **_sizes(num_key_value_heads=4), q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
            v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
            moe_intermediate_size=16, first_k_dense_replace=1,
        ),
    ),
    "Gemma 2": Tiny(
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            **_sizes(**_GROUPED), query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=20.0
        ),
    ),
    "GPT-OSS": Tiny(
        hf.GptOssForCausalLM,
        hf.GptOssConfig(
            **_sizes(**_GROUPED), sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
}  # fmt: skip


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output, in order."""
    return [each for each in output.to_tuple() if isinstance(each, torch.Tensor)]


def told_weights(output: Any) -> list[torch.Tensor]:
    """What `output_attentions=True` tells, in the order in which the layers run."""
    if getattr(output, "decoder_attentions", None) is None:
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(each for pair in pairs for each in pair)]


def every_name() -> dict[str, Any]:
    """Everything that a watch may touch: transformers' registry, each modelling file's functions, and torch's own."""
    names = {f"registry {name}": each for name, each in hf.AttentionInterface._global_mapping.items()}
    for file, module in tuple(sys.modules.items()):
        if file.startswith("transformers.models.") and ".modeling_" in file:
            names |= {f"{file}.{name}": each for name, each in vars(module).items() if callable(each)}
    functional = torch.nn.functional
    names["sdpa"], names["mha"] = (
        functional.scaled_dot_product_attention,
        functional.multi_head_attention_forward,
    )
    return names
