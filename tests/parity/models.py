"""Attention modules of `transformers`, from tiny models with random weights, and layers converted from them.

A module runs inside its model, which builds its masks, angles and caches. Only the hidden states that reach it are
replaced, so that the layer gets the same input.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from regard.nn import KVCache, from_transformers
from regard.nn.convert_transformers import read_window
from regard.types import Array
from tests.parity.compare import (
    Comparison,
    Float64Mode,
    ParityResult,
    draw_normal,
    max_scores,
    randomize,
    record_magnitudes,
)

Tensor = Any  # mypy does not follow torch's types

TOKENS, MANY = 13, 150
LENGTHS, MANY_LENGTHS = (13, 8, 5), (150, 33, 97)  # of the batch entries, if they are padded
CHUNKS = (6, 1, 3, 1, 2)
MEMORY, MEMORY_LENGTHS = 9, (9, 4, 6)  # keys of cross-attention
WIDTH, HEADS = 32, 4


@dataclass(frozen=True, eq=False)
class Subject:
    """An attention module: its place in a model, and what it supports."""

    name: str
    model: str  # a model of transformers, by the name of its configuration
    path: str  # the name of the module in the model
    options: dict[str, Any] = field(default_factory=dict)  # of the configuration
    output: str = ""  # the submodule that returns what the layer returns, if it is not the module
    decodes: bool = True
    bias_from: str = ""  # the name of the module whose score modifications it shares
    is_cross: bool = False  # attends to a memory, not to its own tokens


def _llama_like(**options: Any) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 16,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 50,
        "pad_token_id": 0,
        **options,
    }


_T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 16,
    "num_heads": HEADS,
    "num_layers": 2,
    "vocab_size": 50,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
_OSS = _llama_like(head_dim=12, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
_GEMMA = _llama_like(head_dim=12, query_pre_attn_scalar=20, attn_logit_softcapping=2.0, sliding_window=4)
_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"
_LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

SUBJECTS = (
    Subject("Llama: rotary, grouped heads", "Llama", "layers.0.self_attn", _llama_like()),
    Subject("Llama 3: scaled angles, one key head", "Llama", "layers.1.self_attn",
            _llama_like(num_key_value_heads=1, head_dim=10, rope_parameters=_LLAMA_3, attention_bias=True)),
    Subject("Mistral: sliding window", "Mistral", "layers.0.self_attn", _llama_like(sliding_window=4)),
    Subject("Qwen 3: norms of queries and keys", "Qwen3", "layers.0.self_attn", _llama_like(head_dim=10)),
    Subject("Gemma 2: softcap, sliding window", "Gemma2", "layers.0.self_attn", _GEMMA),
    Subject("Gemma 2: softcap, every key", "Gemma2", "layers.1.self_attn", _GEMMA),
    Subject("GPT-OSS: sinks, YaRN, sliding window", "GptOss", "layers.0.self_attn", _OSS),
    Subject("GPT-OSS: sinks, YaRN, every key", "GptOss", "layers.1.self_attn", _OSS),
    Subject("GPT-NeoX: a quarter rotated, fused by head", "GPTNeoX", "layers.0.attention",
            _llama_like(num_key_value_heads=None, num_attention_heads=2)),
    Subject("GPT-2: fused, scale by layer", "GPT2", "h.1.attn",
            {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 2, "vocab_size": 50, "n_positions": MANY,
             "bos_token_id": 0, "eos_token_id": 0, "scale_attn_by_inverse_layer_idx": True}),
    Subject("BLOOM: ALiBi", "Bloom", "h.0.self_attention",
            {"hidden_size": WIDTH, "n_head": HEADS, "n_layer": 1, "vocab_size": 50}, output="dense"),
    Subject("MPT: ALiBi, six heads", "Mpt", "blocks.0.attn",
            {"d_model": 24, "n_heads": 6, "n_layers": 1, "vocab_size": 50, "max_seq_len": MANY}),
    Subject("T5 encoder: relative bias", "T5", f"encoder.block.0.{_SELF}", _T5, decodes=False),
    Subject("T5 decoder: relative bias", "T5", f"decoder.block.0.{_SELF}", _T5),
    Subject("T5 decoder, second layer", "T5", f"decoder.block.1.{_SELF}", _T5,
            bias_from=f"decoder.block.0.{_SELF}"),
    Subject("T5 cross-attention", "T5", f"decoder.block.0.{_CROSS}", _T5, is_cross=True),
    Subject("BERT: both directions", "Bert", "encoder.layer.0.attention",
            {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1, "intermediate_size": 16,
             "vocab_size": 50}, output="output.dense", decodes=False),
)  # fmt: skip


@functools.lru_cache(4)
def _build_model(subject: Subject, storage: torch.dtype, dtype: torch.dtype) -> Any:
    """Build the model with numbers of the storage dtype, to be computed in another."""
    import transformers

    config = getattr(transformers, f"{subject.model}Config")(**subject.options)
    torch.manual_seed(0)
    # Eager attention returns its weights, and eager experts support float64.
    config._experts_implementation = "eager"
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    randomize(list(model.get_submodule(subject.path).parameters()))
    if subject.bias_from:
        randomize(list(model.get_submodule(subject.bias_from).parameters()), seed=50)
    # Only parameters, as loading does: angles stay in float32.
    for x in model.parameters():
        x.data = x.data.to(storage).to(dtype)
    return model


@dataclass(frozen=True)
class Situation:
    """Which tokens are real, and in which chunks they arrive."""

    name: str
    real: Array  # (batch, tokens)
    chunks: tuple[int, ...] = ()  # with a cache


def _real_tokens(side: str, lengths: tuple[int, ...], tokens: int) -> Array:
    counted = np.arange(tokens) < np.array(lengths)[:, None]
    return counted if side == "right" else counted[:, ::-1].copy()


_WHOLE = np.ones((len(LENGTHS), TOKENS), bool)
ONE_PASS = (
    Situation("one pass", _WHOLE),
    Situation("padded right", _real_tokens("right", LENGTHS, TOKENS)),
    Situation("padded left", _real_tokens("left", LENGTHS, TOKENS)),
    Situation(f"{MANY} tokens, padded left", _real_tokens("left", MANY_LENGTHS, MANY)),
)
DECODING = (
    Situation("cache, token by token", _WHOLE, (1,) * TOKENS),
    Situation("cache, uneven chunks", _WHOLE, CHUNKS),
    Situation("cache, padded left", _real_tokens("left", LENGTHS, TOKENS), (9, *(1,) * 4)),
)


def comparisons() -> Iterator[Comparison]:
    """Yield every module in every situation that it supports."""
    for subject in SUBJECTS:
        for situation in ONE_PASS + (DECODING if subject.decodes else ()):
            theirs = functools.partial(_run_module, subject, situation)
            ours = functools.partial(_run_layer, subject, situation)
            yield Comparison(subject.name, situation.name, theirs, ours)


class _Run:
    """The inputs of a module or its layer in a situation, and its recorded results."""

    def __init__(
        self, subject: Subject, situation: Situation, storage: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.subject, self.real = subject, situation.real
        self.model = _build_model(subject, storage, dtype)
        self.module = self.model.get_submodule(subject.path)
        is_unpadded = situation.real.all()
        side = "left" if situation is not ONE_PASS[1] else "right"
        self.memory_real = _real_tokens(
            side, (MEMORY,) * len(LENGTHS) if is_unpadded else MEMORY_LENGTHS, MEMORY
        )
        width = self.model.config.hidden_size
        self.x, self.memory = (
            _fill_padding(draw_normal(seed, *real.shape, width).to(storage).to(dtype), real)
            for seed, real in ((100, self.real), (101, self.memory_real))
        )
        # (start, stop) of each call; one call without a cache.
        edges = np.cumsum([0, *(situation.chunks or (self.real.shape[1],))])
        self.calls = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        self.outputs: list[Tensor] = []
        self.weights: Any = None
        self.max_scores: list[Array] = []
        self.magnitudes: list[Array] = []

    def record(
        self, start: int, stop: int, output: Tensor, weights: Tensor, columns: Array, first: Any = 0
    ) -> None:
        """Record the result of a call; `columns` are the keys of its weights, counted from `first`, (batch or 1, …)."""
        batch, heads, _, _ = weights.shape
        if self.weights is None:
            tokens = self.real.shape[1]
            self.weights = np.zeros((batch, heads, tokens, MEMORY if self.subject.is_cross else tokens))
        first, columns = np.broadcast_to(first, batch), np.broadcast_to(columns, (batch, columns.shape[-1]))
        for entry, (row, at) in enumerate(zip(weights.double().numpy(), columns, strict=True)):
            is_token = at >= 0
            self.weights[entry, :, start:stop][..., first[entry] + at[is_token]] = row[..., is_token]
        self.outputs.append(output)

    def collect(self) -> ParityResult:
        """Return output and weights of the real tokens; rows of padding are undefined."""
        output = torch.cat(self.outputs, 1).double().numpy()
        result = ParityResult(output[self.real], self.weights.swapaxes(1, 2)[self.real])
        if not self.max_scores:
            return result
        max_scores = np.concatenate(self.max_scores, 2).swapaxes(1, 2)
        magnitudes = np.concatenate(self.magnitudes, 1)
        return result._replace(max_scores=max_scores[self.real], magnitudes=magnitudes[self.real])


def _fill_padding(x: Tensor, real: Array) -> Tensor:
    """Put large numbers into the padding of x, which must not matter."""
    return torch.where(torch.tensor(real)[..., None], x, torch.full_like(x, 50.0))


def _run_module(
    subject: Subject, situation: Situation, storage: torch.dtype, dtype: torch.dtype
) -> ParityResult:
    """Run the module inside its model."""
    run = _Run(subject, situation, storage, dtype)
    cache = _build_cache(subject, run.model.config) if situation.chunks else None
    for start, stop in run.calls:
        with _replace_input(run, start, stop), Float64Mode() if dtype is torch.float64 else nullcontext():
            run.model(**_build_arguments(run, start, stop, cache))
    return run.collect()


def _build_cache(subject: Subject, config: Any) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    if subject.model == "T5":
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=config)


def _build_arguments(run: _Run, start: int, stop: int, cache: Any) -> dict[str, Any]:
    """Build the arguments of the model. Token ids do not matter, because the module's input is replaced."""
    ids = torch.ones(run.real.shape, dtype=torch.long)[:, start:stop]
    real = torch.tensor(run.real[:, :stop]).long()
    cache_options = {"past_key_values": cache, "use_cache": cache is not None}
    if run.subject.model != "T5":
        cache_options = cache_options if run.subject.decodes else {}
        return {"input_ids": ids, "attention_mask": real, **cache_options}
    if not run.subject.decodes:
        return {"input_ids": ids, "attention_mask": real, "decoder_input_ids": ids[:, :1]}
    memory = torch.tensor(run.memory_real).long()
    return {
        "input_ids": torch.ones_like(memory),
        "attention_mask": memory,
        "decoder_input_ids": ids,
        "decoder_attention_mask": real,
        **cache_options,
    }


@contextmanager
def _replace_input(run: _Run, start: int, stop: int) -> Iterator[None]:
    """Replace the input of the module while the model runs, and record its result."""
    results: dict[str, Tensor] = {}

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        replaced = {"hidden_states": run.x[:, start:stop].contiguous()}
        if run.subject.is_cross:
            replaced["key_value_states"] = run.memory
        if args:
            return (replaced.pop("hidden_states"), *args[1:]), {**kwargs, **replaced}
        return args, {**kwargs, **replaced}

    def after(module: Any, args: Any, result: Any) -> None:
        results["weights"] = result[-1]
        results.setdefault("output", result[0])

    def after_part(module: Any, args: Any, result: Any) -> None:
        results["output"] = result

    hooks = [run.module.register_forward_pre_hook(before, with_kwargs=True)]
    if run.subject.output:
        hooks.append(run.module.get_submodule(run.subject.output).register_forward_hook(after_part))
    hooks.append(run.module.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    kv_len = results["weights"].shape[-1]
    last = MEMORY if run.subject.is_cross else stop  # a cache with a window holds the last tokens
    run.record(start, stop, results["output"], results["weights"], np.arange(last - kv_len, last))


def _run_layer(
    subject: Subject, situation: Situation, storage: torch.dtype, dtype: torch.dtype
) -> ParityResult:
    """Run the layer that is converted from the module."""
    run = _Run(subject, situation, storage, dtype)
    layer, options = from_transformers(run.module)
    if subject.bias_from:
        options["score_mod"] = from_transformers(run.model.get_submodule(subject.bias_from))[1]["score_mod"]
    key, cache = run.memory if subject.is_cross else None, None
    real = run.memory_real if subject.is_cross else run.real
    first = 0  # the token that a column counts from
    if situation.chunks:
        cache = (
            layer.project_kv(key, padding=real)
            if subject.is_cross
            else KVCache(window=read_window(run.module))
        )
        first = real.argmax(1)  # padding is not cached
    for start, stop in run.calls:
        if subject.is_cross and cache is not None:
            arguments: dict[str, Any] = {"key": cache}
        else:
            part = real if subject.is_cross else real[:, start:stop]
            arguments = {"key": key, "cache": cache, "padding": None if part.all() else torch.tensor(part)}
        with record_magnitudes(layer) as magnitudes:
            output, A = layer(run.x[:, start:stop], **arguments, **options, need_matrix=True)
        columns = np.arange(A.shape[-1]) if cache is None else cache.positions
        run.record(start, stop, output, A.to_dense(), columns, first)
        run.max_scores.append(max_scores(A))
        run.magnitudes += magnitudes
    return run.collect()
