"""Random runs of tiny models: family × decoding mode × padding × batch × edits, each found again by its number."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers as hf
from transformers.cache_utils import DynamicCache, DynamicLayer

VOCABULARY = 61
LONG = 1200  # tokens; keys of so many tokens are more than is compared of a sample
# What is compared; an edited run is recorded as well.
CHECKS = ("edit", "watch", "edit", "implementation")


class Family(NamedTuple):
    """A model family.

    Args:
        model_class: Class of the model.
        config: Its configuration, with head counts and lengths that are unlike each other.
        layers: Pattern of the names of its attention layers, with `{}` for their number, in the order of each block.
        heads: Number of heads.
        kind: What it reads and does: "decoder", "pairs" (encoder and decoder), "audio", "encoder" or "pixels".
        window: Size of the smallest sliding window; 0 if there is none.
        implementation: Its attention implementation; default: of transformers.
        own_softmax: Class of attention layers that compute their own softmax.
        modes: Decoding modes; default: of its kind.
        length: Number of tokens of a prompt; default: drawn.
    """

    model_class: Any
    config: Any
    layers: tuple[str, ...]
    heads: int
    kind: str = "decoder"
    window: int = 0
    implementation: str | None = None
    own_softmax: str = ""
    modes: tuple[str, ...] = ()
    length: int = 0

    def build(
        self, implementation: str | None, dtype: torch.dtype = torch.float32, config: Any = None
    ) -> Any:
        """Build the model in eval mode, with large weights that do not depend on the implementation."""
        torch.manual_seed(0)
        config = copy.deepcopy(self.config if config is None else config)
        options = {} if implementation is None else {"attn_implementation": implementation}
        if hasattr(config, "num_experts_per_tok"):
            options["experts_implementation"] = "eager"  # the grouped product does not support float64
        model = self.model_class._from_config(config, **options).eval()
        noise = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.1)
        return model.to(dtype)

    def list_layers(self) -> list[str]:
        """List the names of the attention layers in the order in which they run."""
        encoder = [pattern for pattern in self.layers if "encoder." in pattern]
        rest = [pattern for pattern in self.layers if pattern not in encoder]
        count = getattr(self.config, "num_hidden_layers", 2)
        return [pattern.format(n) for group in (encoder, rest) for n in range(count) for pattern in group]


def _sizes(hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": heads,
        "intermediate_size": 44, "max_position_embeddings": 1300, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    return {**sizes, **more}


_PAIRS = {
    "vocab_size": VOCABULARY, "d_model": 30, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 44, "decoder_ffn_dim": 44, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_DECODER = ("model.layers.{}.self_attn",)
_SEQ2SEQ = (
    "model.encoder.layers.{}.self_attn",
    "model.decoder.layers.{}.self_attn",
    "model.decoder.layers.{}.encoder_attn",
)

FAMILIES = {
    "Llama": Family(
        hf.LlamaForCausalLM, hf.LlamaConfig(**_sizes(42, 6, num_key_value_heads=3, head_dim=10)), _DECODER, 6
    ),
    "Llama, long": Family(
        hf.LlamaForCausalLM, hf.LlamaConfig(**_sizes(36, 2, num_key_value_heads=2, head_dim=128)), _DECODER, 2,
        modes=("guidance", "interleaved", "prefix", "greedy", "beams"), length=LONG,
    ),
    "Mistral": Family(
        hf.MistralForCausalLM,
        hf.MistralConfig(**_sizes(42, 6, num_key_value_heads=2, head_dim=14, sliding_window=7)), _DECODER, 6, window=7,
    ),
    "Qwen 3": Family(
        hf.Qwen3ForCausalLM, hf.Qwen3Config(**_sizes(35, 5, num_key_value_heads=1, head_dim=8)), _DECODER, 5
    ),
    "Gemma 2": Family(
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            **_sizes(32, 4, num_key_value_heads=2, head_dim=6), query_pre_attn_scalar=6, sliding_window=5,
            attn_logit_softcapping=20.0,
        ),
        _DECODER, 4, window=5, implementation="eager",
    ),
    "Gemma 3": Family(
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(
            **_sizes(30, 3, num_key_value_heads=1, head_dim=10) | {"num_hidden_layers": 3}, sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        _DECODER, 3, window=5,
    ),
    "GPT-OSS": Family(
        hf.GptOssForCausalLM,
        hf.GptOssConfig(
            **_sizes(32, 4, num_key_value_heads=2, head_dim=8), sliding_window=7, num_local_experts=2,
            num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        _DECODER, 4, window=7,
    ),
    "DeepSeek-V3": Family(
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            **_sizes(33, 3, num_key_value_heads=3), q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4,
            qk_nope_head_dim=6, v_head_dim=7, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
            n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=2,
        ),
        _DECODER, 3,
    ),
    "GPT-2": Family(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=35, n_layer=2, n_head=5, n_positions=1300, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        ),
        ("transformer.h.{}.attn",), 5,
    ),
    "GPT-NeoX": Family(
        hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_sizes(48, 6)), ("gpt_neox.layers.{}.attention",), 6
    ),
    "OPT": Family(
        hf.OPTForCausalLM, hf.OPTConfig(**_sizes(33, 3, ffn_dim=44, word_embed_proj_dim=33, dropout=0.0)),
        ("model.decoder.layers.{}.self_attn",), 3,
    ),
    "BLOOM": Family(
        hf.BloomForCausalLM,
        hf.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=30, n_layer=2, n_head=3, pad_token_id=0, bos_token_id=1, eos_token_id=2
        ),
        ("transformer.h.{}.self_attention",), 3, own_softmax="BloomAttention",
    ),
    "MPT": Family(
        hf.MptForCausalLM,
        hf.MptConfig(
            vocab_size=VOCABULARY, d_model=35, n_layers=2, n_heads=5, max_seq_len=64, use_cache=True, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        ),
        ("transformer.blocks.{}.attn",), 5, own_softmax="MptAttention",
    ),
    "BART": Family(
        hf.BartForConditionalGeneration,
        hf.BartConfig(**_PAIRS, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None),
        _SEQ2SEQ, 3, "pairs",
    ),
    "T5": Family(
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            vocab_size=VOCABULARY, d_model=33, d_kv=7, d_ff=44, num_layers=2, num_heads=5,
            relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=2,
        ),
        (
            "encoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.1.EncDecAttention",
        ),
        5, "pairs",
    ),
    "Whisper": Family(
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            **_PAIRS, num_mel_bins=8, max_source_positions=11, max_target_positions=32, decoder_start_token_id=3,
            begin_suppress_tokens=None, suppress_tokens=None,
        ),
        _SEQ2SEQ, 3, "audio",
    ),
    "BERT": Family(
        hf.BertForMaskedLM, hf.BertConfig(**_sizes(35, 5)), ("bert.encoder.layer.{}.attention.self",), 5, "encoder"
    ),
    "ViT": Family(
        hf.ViTModel,
        hf.ViTConfig(
            hidden_size=33, num_hidden_layers=2, num_attention_heads=3, intermediate_size=44, image_size=12,
            patch_size=4,
        ),
        ("layers.{}.attention",), 3, "pixels",
    ),
}  # fmt: skip


# -- Draws


@dataclass(frozen=True)
class Run:
    """One random run.

    Args:
        number: Its number.
        family: Name of the model family.
        mode: Name of the decoding mode.
        padding: "none", "left" or "right".
        batch: Number of batch entries.
        check: What is compared with eager attention: "watch", "edit" or "implementation".
        seed: Seed of everything else.
    """

    number: int
    family: str
    mode: str
    padding: str
    batch: int
    check: str
    seed: int

    def __str__(self) -> str:
        drawn = f"{self.family}, {self.mode}, padding {self.padding}, batch {self.batch}, {self.check}"
        return f"run {self.number}: {drawn}"


def list_modes(family: Family) -> list[str]:
    """List the decoding modes of a family."""
    if family.modes:
        return list(family.modes)
    return [
        name
        for name, mode in MODES.items()
        if family.kind in mode.kinds
        and not (mode.crops and family.window)
        and not (mode.is_static and family.own_softmax)
    ]


def draw_runs(count: int, seed: int) -> list[Run]:
    """Draw runs: each takes a pair of family and mode that is rare so far, so that even a few cover all of both."""
    pairs = [(family, mode) for family in FAMILIES for mode in list_modes(FAMILIES[family])]
    rng, drawn, runs = random.Random(seed), Counter[Any](), []
    offset = {mode: rng.randrange(len(CHECKS)) for mode in MODES}
    for number in range(count):
        rng.shuffle(pairs)
        name, mode = min(pairs, key=lambda pair: 4 * drawn[pair] + 2 * drawn[pair[0]] + drawn[pair[1]])
        family = FAMILIES[name]
        batch = 1 if MODES[mode].single or family.length else rng.choice((1, 2, 3))
        padding = rng.choice(list_paddings(family, mode)) if batch > 1 else "none"
        check = CHECKS[(drawn[mode] + drawn[name, mode] + offset[mode]) % len(CHECKS)]
        if check == "implementation" and family.own_softmax:
            check = "watch"
        drawn.update(((name, mode), mode, name))
        runs.append(Run(number, name, mode, padding, batch, check, rng.randrange(2**31)))
    return runs


def list_paddings(family: Family, mode: str) -> list[str]:
    """List the sides on which prompts can be padded: a decoder that generates continues at the right."""
    if family.kind in ("pixels", "audio"):
        return ["none"]
    return ["none", "left"] if family.kind == "decoder" and mode != "forward" else ["none", "left", "right"]


# -- Inputs


def build_inputs(run: Run, seed: int) -> dict[str, Any]:
    """Build the inputs of a run: prompts, pixels or sound."""
    family, rng = FAMILIES[run.family], random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    if family.kind == "pixels":
        return {"pixel_values": torch.randn(run.batch, 3, 12, 12, generator=noise)}
    if family.kind == "audio":
        return {"input_features": torch.randn(run.batch, 8, 22, generator=noise)}
    length = family.length or rng.randint(7, 13)
    real = torch.ones(run.batch, length, dtype=torch.long)
    for entry in range(1, run.batch):
        hidden = rng.randint(1, 4)
        if run.padding != "none":
            real[entry, slice(hidden) if run.padding == "left" else slice(length - hidden, length)] = 0
    tokens = torch.randint(3, VOCABULARY, (run.batch, length), generator=noise) * real
    return {"input_ids": tokens, "attention_mask": real}


# -- Decoding modes. Each runs a model and returns what is compared: tokens, and logits of tokens that are not padding.

Tensors = list[torch.Tensor]


class Mode(NamedTuple):
    """A decoding mode.

    Args:
        decode: Runs a model on inputs; draws from a source of chance that is the same for every model.
        kinds: Kinds of families that it supports.
        single: Whether it takes one batch entry only.
        crops: Whether it crops the cache, which a rolling one cannot.
        changes_batch: Whether the model reads batches of several sizes.
        is_static: Whether the cache is static, which BLOOM and MPT do not support.
    """

    decode: Callable[[Any, dict[str, Any], random.Random], Tensors]
    kinds: tuple[str, ...] = ("decoder",)
    single: bool = False
    crops: bool = False
    changes_batch: bool = False
    is_static: bool = False


def get_logits(output: Any) -> torch.Tensor:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits


def decode_forward(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    real = inputs.get("attention_mask")
    if model.config.is_encoder_decoder:
        batch = len(next(iter(inputs.values())))
        tokens = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(7)] for _ in range(batch)])
        inputs, real = {**inputs, "decoder_input_ids": tokens}, None
    logits = get_logits(model(**inputs))
    return [logits if real is None else logits[real.bool()]]


def generate(
    model: Any, inputs: dict[str, Any], rng: random.Random, *, scores: bool = False, **options: Any
) -> Tensors:
    count = rng.randint(4, 9)
    settings = {
        "max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2,
        "return_dict_in_generate": True, "output_logits": not scores, "output_scores": scores,
    } | {name: options.pop(name) for name in tuple(options) if name in SETTINGS}  # fmt: skip
    config = hf.GenerationConfig(**settings)
    torch.manual_seed(rng.randrange(2**31))
    if isinstance(model, hf.WhisperForConditionalGeneration):
        # Whisper's own method splits audio into segments; call the method that all models share.
        config.decoder_start_token_id, config.bos_token_id = 3, 1
        output = hf.GenerationMixin.generate(model, **inputs, **options, generation_config=config)
    else:
        output = model.generate(**inputs, **options, generation_config=config)
    return [output.sequences, *(output.scores if scores else output.logits)]


SETTINGS = (
    "do_sample", "top_k", "temperature", "num_beams", "num_return_sequences", "guidance_scale", "cache_implementation",
    "use_cache", "prompt_lookup_num_tokens", "prefill_chunk_size", "length_penalty", "num_assistant_tokens",
)  # fmt: skip


def decode_beams(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    beams = 2 if inputs.get("input_ids", torch.empty(0, 0)).shape[1] >= LONG else rng.randint(2, 4)
    returned = rng.randint(1, beams)
    return generate(model, inputs, rng, num_beams=beams, num_return_sequences=returned)


def decode_guidance(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Guide by a prompt that differs in one early token, or by another one of another length."""
    tokens = inputs["input_ids"]
    if tokens.shape[1] >= LONG or rng.random() < 0.6:
        other, mask = change_token(tokens, inputs["attention_mask"], rng), inputs["attention_mask"]
    else:
        length = rng.randint(3, 9)
        other = torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in tokens])
        mask = torch.ones_like(other)
    return generate(
        model, inputs, rng, scores=True, negative_prompt_ids=other, negative_prompt_attention_mask=mask,
        guidance_scale=rng.choice((1.5, 3.0)),
    )  # fmt: skip


def change_token(tokens: torch.Tensor, real: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Change one early token of each prompt, none of its padding."""
    changed = tokens.clone()
    for entry, mask in zip(changed, real, strict=True):
        at = int(mask.nonzero()[0]) + rng.randrange(int(min(mask.sum(), 9)) - 1)
        entry[at] = 3 + (entry[at] - 2) % (VOCABULARY - 3)
    return changed


def decode_assisted(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Assist by a smaller model, of one layer: it proposes tokens, of which some are rejected."""
    config = copy.deepcopy(FAMILIES["Llama"].config)
    config.num_hidden_layers = 1
    assistant = FAMILIES["Llama"].build("sdpa", config=config)
    assistant.generation_config.num_assistant_tokens = rng.randint(2, 4)
    return generate(model, inputs, rng, assistant_model=assistant)


class Feeder:
    """A cache that is filled by hand: tokens in, logits of real tokens out."""

    def __init__(self, model: Any, cache: Any = None) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config) if cache is None else cache
        self.real: torch.Tensor | None = None

    def feed(self, tokens: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Read tokens, (batch, n), of which `real` are not padding."""
        real = torch.ones_like(tokens) if real is None else real
        self.real = real if self.real is None else torch.cat([self.real, real], 1)
        output = self.model(
            input_ids=tokens, attention_mask=self.real, past_key_values=self.cache, use_cache=True
        )
        return output.logits[real.bool()]

    def copy(self) -> Feeder:
        """Return a feeder with a copy of the cache."""
        other = Feeder(self.model, copy.deepcopy(self.cache))
        other.real = self.real
        return other

    def crop(self, count: int) -> None:
        """Remove the newest tokens."""
        self.cache.crop(-count)
        assert self.real is not None
        self.real = self.real[:, :-count]


def draw_tokens(rng: random.Random, batch: int, count: int) -> torch.Tensor:
    return torch.tensor([[rng.randrange(3, VOCABULARY) for _ in range(count)] for _ in range(batch)])


def decode_prefix(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Read a prefix once, and continue copies of its cache, one after the other or in turn."""
    tokens = inputs["input_ids"]
    prefix = Feeder(model)
    logits = [prefix.feed(tokens, inputs["attention_mask"])]
    feeders = [prefix.copy() for _ in range(rng.randint(2, 3))]
    rounds = [(feeder, rng.randint(1, 4)) for feeder in feeders for _ in range(2)]
    if rng.random() < 0.5:
        rounds = rounds[::2] + rounds[1::2]
    return logits + [feeder.feed(draw_tokens(rng, len(tokens), count)) for feeder, count in rounds]


def decode_interleaved(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Read two prompts that differ in one early token, or in all, and continue them in turn."""
    tokens, real = inputs["input_ids"], inputs["attention_mask"]
    other = (
        change_token(tokens, real, rng)
        if rng.random() < 0.7
        else torch.where(real > 0, tokens.flip(0) % 7 + 3, 0)
    )
    feeders = [Feeder(model), Feeder(model)]
    logits = [feeder.feed(prompt, real) for feeder, prompt in zip(feeders, (tokens, other), strict=True)]
    same = rng.random() < 0.5  # continue with the same tokens
    for _ in range(rng.randint(2, 4)):
        new = draw_tokens(rng, len(tokens), 1)
        for feeder in feeders:
            logits.append(feeder.feed(new if same else draw_tokens(rng, len(tokens), 1)))
    return logits


def decode_chunks(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Read a prompt in pieces."""
    tokens, real, first, logits = inputs["input_ids"], inputs["attention_mask"], 0, []
    feeder = Feeder(model, DynamicCache() if rng.random() < 0.5 else None)  # the first one holds all keys
    while first < tokens.shape[1]:
        piece = slice(first, first + rng.randint(1, 5))
        logits.append(feeder.feed(tokens[:, piece], real[:, piece]))
        first = piece.stop
    return logits


def decode_cropped(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Propose tokens, remove some, and continue; a second time after other tokens."""
    tokens, feeder = inputs["input_ids"], Feeder(model)
    logits = [feeder.feed(tokens, inputs["attention_mask"])]
    for _ in range(2):
        logits.append(feeder.feed(draw_tokens(rng, len(tokens), 4)))
        feeder.crop(rng.randint(1, 3))
        logits += [feeder.feed(draw_tokens(rng, len(tokens), 1)) for _ in range(4)]
    return logits


def decode_contrastive(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Read candidates for each next token side by side, and keep one of them, as contrastive search does."""
    tokens, feeder, width = inputs["input_ids"], Feeder(model), rng.randint(2, 3)
    logits = [feeder.feed(tokens, inputs["attention_mask"])]
    for _ in range(3):
        feeder.cache.batch_repeat_interleave(width)
        feeder.real = feeder.real.repeat_interleave(width, 0)
        logits.append(feeder.feed(draw_tokens(rng, width * len(tokens), 1)))
        chosen = torch.tensor([entry * width + rng.randrange(width) for entry in range(len(tokens))])
        feeder.cache.batch_select_indices(chosen)
        feeder.real = feeder.real[chosen]
    return logits


def decode_reset(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    """Fill a static cache, reset it, and fill it with another prompt."""
    tokens, real = inputs["input_ids"], inputs["attention_mask"]
    cache = hf.StaticCache(config=model.config, max_cache_len=tokens.shape[1] + rng.randint(3, 9))
    logits = []
    for prompt in (tokens, change_token(tokens, real, rng)):
        feeder = Feeder(model, cache)
        logits += [
            feeder.feed(prompt, real),
            *(feeder.feed(draw_tokens(rng, len(tokens), 1)) for _ in range(3)),
        ]
        cache.reset()
    return logits


class RequantisedLayer(DynamicLayer):
    """A cache layer whose older keys and values change every three calls, as those of a quantised cache do.

    Rounding to a grid would differ between float32 and float64; this change is smooth.
    """

    num_updates = 0

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_updates += 1
        if self.num_updates % 3 == 0:
            self.keys, self.values = (
                states + 0.05 * torch.sin(7 * states) for states in (self.keys, self.values)
            )
        return super().update(key_states, value_states, *args, **kwargs)


def decode_requantised(model: Any, inputs: dict[str, Any], rng: random.Random) -> Tensors:
    cache = hf.cache_utils.Cache(layer_class_to_replicate=RequantisedLayer)
    feeder = Feeder(model, cache)
    logits = [feeder.feed(inputs["input_ids"], inputs["attention_mask"])]
    return logits + [
        feeder.feed(draw_tokens(rng, len(inputs["input_ids"]), 1)) for _ in range(rng.randint(4, 7))
    ]


def with_options(**options: Any) -> Callable[[Any, dict[str, Any], random.Random], Tensors]:
    """Return a mode that calls `generate()` with options."""
    return lambda model, inputs, rng: generate(model, inputs, rng, **options)


GENERATES = ("decoder", "pairs", "audio")
MODES = {
    "forward": Mode(decode_forward, ("decoder", "pairs", "audio", "encoder", "pixels")),
    "greedy": Mode(with_options(), GENERATES),
    "sampling": Mode(with_options(do_sample=True, top_k=9, temperature=1.3), GENERATES),
    "beams": Mode(decode_beams, GENERATES, changes_batch=True),
    "sampled beams": Mode(with_options(do_sample=True, num_beams=3), GENERATES, changes_batch=True),
    "no cache": Mode(with_options(use_cache=False), GENERATES),
    "static cache": Mode(with_options(cache_implementation="static"), ("decoder", "pairs"), is_static=True),
    "chunked prefill": Mode(with_options(prefill_chunk_size=3)),
    "guidance": Mode(decode_guidance),
    "assisted": Mode(decode_assisted, single=True),
    "prompt lookup": Mode(with_options(prompt_lookup_num_tokens=3), single=True),
    "reset": Mode(decode_reset, is_static=True),
    "prefix": Mode(decode_prefix),
    "interleaved": Mode(decode_interleaved),
    "chunks": Mode(decode_chunks),
    "cropped": Mode(decode_cropped, crops=True),
    "contrastive": Mode(decode_contrastive, changes_batch=True),
    "requantised": Mode(decode_requantised, crops=True),
}
