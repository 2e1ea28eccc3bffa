"""Faults planted in tiny models of transformers: each function builds a model, clean or with one fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.helpers.planted_models import ROPE_BASE
from tests.helpers.tiny_models import TINY, TinyModel

SOFTCAP = 0.5  # low, since the scores of a tiny model are small


def _vary(model: str, config_class: Any, model_class: Any, **options: Any) -> TinyModel:
    """Return a tiny model of another class, with the sizes of one of TINY."""
    sizes = {name: getattr(TINY[model].config, name) for name in _SIZES}
    return TINY[model]._replace(model_class=model_class, config=config_class(**sizes | options))


_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "pad_token_id",
    "bos_token_id", "eos_token_id", "max_position_embeddings",
)  # fmt: skip
_LLAMA: dict[str, Any] = {
    "config_class": hf.LlamaConfig, "model_class": hf.LlamaForCausalLM, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_SCALED = {"rope_theta": ROPE_BASE, "factor": 4.0, "original_max_position_embeddings": 16}

MODELS: dict[str, TinyModel] = TINY | {
    "Llama of four layers": _vary("Llama", **_LLAMA, num_hidden_layers=4),
    "Llama with llama3 scaling": _vary(
        "Llama", **_LLAMA,
        rope_parameters=_SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "Llama with YaRN": _vary("Llama", **_LLAMA, rope_parameters=_SCALED | {"rope_type": "yarn"}),
    "Gemma 3 of text": _vary(
        "Llama", hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, num_key_value_heads=2, head_dim=8, sliding_window=5,
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "OPT": _vary("Llama", hf.OPTConfig, hf.OPTForCausalLM, ffn_dim=48, word_embed_proj_dim=32),
    "GPT-NeoX": _vary("Llama", hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM),
}  # fmt: skip


def build(name: str, plant: Callable[[Any], None] | None = None) -> Any:
    """Build a tiny model in eval mode, and plant a fault."""
    model = MODELS[name].build()
    if name == "Gemma 2":
        model.config.attn_logit_softcapping = SOFTCAP
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = SOFTCAP
    if plant is not None:
        plant(model)
    return model


def drop_sinks(model: Any) -> None:
    """Let GPT-OSS run an attention function that does not know sinks, as a forced implementation does."""
    model.config._attn_implementation = "sdpa"
    model.config._attn_implementation_internal = "sdpa"


def drop_softcap(model: Any) -> None:
    """Forget the soft cap in the second layer of Gemma 2."""
    model.model.layers[1].self_attn.attn_logit_softcapping = None


def change_frequencies(model: Any) -> None:
    """Compute rotary frequencies from another base than the configuration's."""
    rotary = model.model.rotary_emb
    dim = 2 * len(rotary.inv_freq)
    rotary.inv_freq.copy_(1e6 ** (-torch.arange(0, dim, 2) / dim))


def widen_window(model: Any) -> None:
    """Let every token of Mistral attend to one key more than the configuration's window."""

    def widen(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None:
            shifted = torch.nn.functional.pad(mask[..., 1:], (0, 1))
            mask = mask | shifted
        return args, kwargs | {"attention_mask": mask}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(widen, with_kwargs=True)


def change_encoder_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a fault that passes changed encoder states to the decoder of T5 or BART."""

    def plant(model: Any) -> None:
        def change_states(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"encoder_hidden_states": change(kwargs["encoder_hidden_states"])}

        model.get_decoder().register_forward_pre_hook(change_states, with_kwargs=True)

    return plant


def drop_encoder_mask(model: Any) -> None:
    """Forget the padding of the encoder in the cross-attention of BART."""

    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"encoder_attention_mask": None}

    model.get_decoder().register_forward_pre_hook(drop, with_kwargs=True)


def forget_causality(model: Any) -> None:
    """Pass every layer of Llama an empty mask and no is_causal, as an attention without mask function does."""

    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": None, "is_causal": False}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(drop, with_kwargs=True)


def break_weight(model: Any) -> None:
    """Put a NaN into a weight between two attention layers of Llama."""
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan


def positions_without_padding(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return position ids that do not count padding, (batch, n)."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def forget_scaling(model: Any) -> None:
    """Compute rotary frequencies of a scaled Llama from its base alone."""
    frequencies = model.model.rotary_emb.inv_freq
    dim = 2 * len(frequencies)
    frequencies.copy_(ROPE_BASE ** (-torch.arange(0, dim, 2) / dim))


def forget_attention_factor(model: Any) -> None:
    """Forget the factor of YaRN for cosines and sines."""
    model.model.rotary_emb.attention_scaling = 1.0


def remove_head_norms(model: Any) -> None:
    """Leave out the norms of queries and keys of Qwen3, and their weights."""
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()


def swap_layer_types(model: Any) -> None:
    """Choose masks and frequencies of each layer by the type of the next layer."""
    types = model.config.layer_types
    model.config.layer_types = types[1:] + types[:1]


def transpose_bias(model: Any) -> None:
    """Count relative positions of T5's encoder as query minus key."""
    attention = model.encoder.block[0].layer[0].SelfAttention
    compute = attention.compute_bias
    attention.compute_bias = lambda *args, **kwargs: compute(*args, **kwargs).mT


def forget_offset(model: Any) -> None:
    """Read the table of OPT from its first row, without the offset of 2."""
    model.model.decoder.embed_positions.offset = 0


def reorder_qkv(model: Any) -> None:
    """Store the fused projection of GPT-NeoX as all queries, all keys, all values, instead of head by head."""
    heads = model.config.num_attention_heads
    for layer in model.gpt_neox.layers:
        for weight in layer.attention.query_key_value.parameters():
            weight.data = weight.data.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def swap_layers(model: Any) -> None:
    """Load the weights of the second layer into the third, and those of the third into the second."""
    second, third = (model.model.layers[layer] for layer in (1, 2))
    weights = {name: weight.clone() for name, weight in second.state_dict().items()}
    second.load_state_dict(third.state_dict())
    third.load_state_dict(weights)


def keep_interleaved_weights(model: Any) -> None:
    """Load queries and keys of a checkpoint with interleaved pairs, without permuting them to the half layout."""
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            pairs = linear.weight.data.unflatten(0, (-1, 2, layer.self_attn.head_dim // 2))
            linear.weight.data = pairs.transpose(1, 2).flatten(0, 2).contiguous()


def use_gelu(model: Any) -> None:
    """Activate the first feed-forward of Llama by GELU instead of SiLU."""
    model.model.layers[0].mlp.act_fn = nn.GELU()


def grow_final_norm(model: Any) -> None:
    """Multiply the weight of the last norm of Llama by 1.1."""
    model.model.norm.weight.data *= 1.1


def break_head(model: Any) -> None:
    """Put a NaN into the projection of Llama to the vocabulary."""
    model.lm_head.weight.data[5, 5] = torch.nan


def break_final_norm(model: Any) -> None:
    """Put an inf into the last norm of Llama."""
    model.model.norm.weight.data[5] = torch.inf


def break_last_feed_forward(model: Any) -> None:
    """Put a NaN into the feed-forward after the last attention layer of BERT."""
    model.encoder.layer[-1].output.dense.weight.data[1, 1] = torch.nan


def overflow_scores(model: Any) -> None:
    """Enlarge queries and keys of the second layer of Llama, so that their products exceed float16."""
    attention = model.model.layers[1].self_attn
    for linear in (attention.q_proj, attention.k_proj):
        linear.weight.data *= 400
    model.half()


def overflow_residual(model: Any) -> None:
    """Enlarge a feed-forward of Llama, so that its output exceeds float16."""
    model.half().model.layers[0].mlp.down_proj.weight.data[:] = 6e4


def add_lora(merged: bool) -> Callable[[], Any]:
    """Return a function that builds Llama with an adapter, which is also merged into the weights if `merged`."""

    def build_lora() -> Any:
        import peft

        config = peft.LoraConfig(
            r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        model = build("Llama")
        torch.manual_seed(7)
        model = peft.get_peft_model(model, config).eval()
        for module in model.modules():
            if merged and isinstance(module, peft.tuners.lora.Linear):
                module.base_layer.weight.data += module.get_delta_weight("default")
        return model

    return build_lora
