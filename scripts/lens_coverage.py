"""How many model classes of the installed transformers the lens reads, refuses, or misses: `--page` writes the table.

Every base model that can be built tiny from its configuration is run twice, plain and watched. It is *read* where the
outputs are bit for bit the same, every layer gave a matrix, and the matrices are those of `output_attentions=True`
where the model tells them; *refused* where the lens raised and said what to do; *missed* otherwise.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import regard
from regard.lens import NotSeen

PAGE = Path(__file__).parents[1] / "docs" / "lens-coverage.md"
MOST = 100_000_000  # parameters of what counts as tiny

# What sizes are called, and what they are set to.
SIZES = (
    (32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim emb_dim image_size"),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth layers",
    ),
    (2, "num_encoder_layers num_key_value_heads num_kv_heads"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (2, "num_experts_per_tok top_k moe_topk moe_top_k num_experts_per_token"),
    (4, "num_local_experts num_experts n_routed_experts"),
    (64, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size"),
    (8, "head_dim d_kv"),
    (99, "vocab_size"),
    (128, "max_position_embeddings n_positions"),
)


def shrink(config: Any) -> None:
    """A configuration with small sizes, and those within it."""
    for size, names in SIZES:
        for name in names.split():
            if isinstance(getattr(config, name, None), int):
                try:
                    setattr(config, name, size)
                except (AttributeError, ValueError):
                    continue
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[-2:]  # hybrids attend in their last ones
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > 98:
            setattr(config, name, 1)
    for within in vars(config).values():
        if isinstance(within, hf.PreTrainedConfig):
            shrink(within)


def candidates() -> Iterator[tuple[str, type, Any]]:
    for kind in sorted(MODEL_MAPPING, key=lambda kind: kind.__name__):
        try:
            models = MODEL_MAPPING[kind]
        except (ImportError, ValueError):  # named, but not there
            continue
        model = models[0] if isinstance(models, tuple) else models
        yield kind.model_type, model, kind


def given(model: Any) -> dict[str, Any]:
    """Inputs by the names that a model's forward takes."""
    takes = inspect.signature(model.forward).parameters
    size = getattr(model.config, "image_size", None) or getattr(
        getattr(model.config, "vision_config", None), "image_size", 32
    )
    size = size if isinstance(size, int) else 32
    channels = getattr(model.config, "num_channels", 3)
    tokens = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    bins = getattr(model.config, "num_mel_bins", getattr(model.config, "feature_size", 80))
    known = {
        "input_ids": tokens,
        "pixel_values": torch.randn(2, channels if isinstance(channels, int) else 3, size, size),
        "input_features": torch.randn(
            2, bins if isinstance(bins, int) else 80, 3000 if "whisper" in model.config.model_type else 64
        ),
        "input_values": torch.randn(2, 4000),
        "decoder_input_ids": tokens[:, :7],
    }
    main = (
        model.main_input_name
        if model.main_input_name in known
        else next((k for k in known if k in takes), "input_ids")
    )
    names = {main, *(("decoder_input_ids",) if getattr(model.config, "is_encoder_decoder", False) else ())}
    if (
        {"input_ids", "pixel_values"} <= takes.keys()
        and hasattr(model.config, "text_config")
        and "clip" in model.config.model_type
    ):
        names |= {"input_ids", "pixel_values"}
    return {name: known[name] for name in names if name in takes}


def flat(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for each in output.values():
            yield from flat(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from flat(each)


def told(output: Any) -> list[torch.Tensor]:
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    return [
        each
        for name in names
        for each in (getattr(output, name, None) or ())
        if isinstance(each, torch.Tensor)
    ]


def verdict(model_type: str, kind: type, config_kind: Any) -> tuple[str, str]:
    """What became of one model: (verdict, what is to be said)."""
    try:
        config = config_kind()
        shrink(config)
        with torch.device("meta"):
            count = sum(each.numel() for each in kind(config).parameters())
        if count > MOST:
            return "not built", f"{count:,} parameters"
        torch.manual_seed(0)
        model = kind(config).eval()
        inputs = given(model)
        torch.manual_seed(1)
        plain = model(**inputs)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    try:
        with regard.watch(model) as seen:
            torch.manual_seed(1)
            watched = model(**inputs)
    except NotSeen as error:
        return "refused", error.received.split("gave nothing: ")[-1]
    except Exception as error:
        return "missed", f"{type(error).__name__}: {str(error)[:200]}"
    pairs = list(zip(flat(plain), flat(watched), strict=True))
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
        return "missed", "outputs changed"
    return compare(model, kind, config, inputs, seen)


def compare(model: Any, kind: type, config: Any, inputs: dict[str, Any], seen: Any) -> tuple[str, str]:
    """Whether the weights that eager attention tells are among those that were seen."""
    calls = [call for layer in seen for call in seen.calls(layer)]
    count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
    try:
        torch.manual_seed(0)
        eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        eager.load_state_dict(model.state_dict())
        torch.manual_seed(1)
        output = eager(**inputs, output_attentions=True)
    except Exception as error:
        return "read", f"{count}; eager attention does not run ({type(error).__name__})"
    weights = told(output)
    torch.manual_seed(1)
    if not all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-3, equal_nan=True)
        for a, b in zip(flat(model(**inputs)[0]), flat(output[0]), strict=False)
    ):
        return "read", f"{count}; with eager attention the model computes something else"
    dense = [call.matrix.to_dense() for call in calls]
    dense += [
        each.mean(1, keepdim=True).expand_as(each) for each in dense if each.ndim == 4
    ]  # some tell the mean
    dense += [each / each.sum(-1, keepdim=True) for each in dense]  # … or leave the sink out
    shapes = {tuple(each.shape) for each in dense}
    comparable = [each for each in weights if tuple(each.shape) in shapes]
    found = sum(
        any(a.shape == b.shape and torch.allclose(a, b.float(), atol=1e-4) for a in dense) for b in comparable
    )
    if found < len(comparable):
        return "missed", f"{found} of {len(comparable)} weights told by eager attention were seen"
    if found < len(weights):
        return (
            "read",
            f"{count}; {found} told by eager attention, all seen; {len(weights) - found} told in other shapes",
        )
    return "read", f"{count}; {found} told by eager attention, all seen" if weights else count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("only", nargs="*", help="model types; all by default")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    rows = []
    for model_type, kind, config in candidates():
        if options.only and model_type not in options.only:
            continue
        found, said = verdict(model_type, kind, config)
        rows.append((model_type, kind.__name__, found, said))
        print(f"{found:10} {kind.__name__:40} {said}", flush=True)
    counts = Counter(found for _, _, found, _ in rows)
    print(dict(counts))
    if options.page:
        PAGE.write_text(page(rows, counts))
    return int(counts["missed"] > 0)


def page(rows: list[tuple[str, str, str, str]], counts: Counter[str]) -> str:
    built = counts["read"] + counts["refused"] + counts["missed"]
    lines = [
        "# Which models the lens reads",
        "",
        f"Every base model of transformers {hf.__version__} that can be built tiny from its configuration, by",
        f"`scripts/lens_coverage.py`: of {built} that ran, {counts['read']} are read, {counts['refused']} refused with",
        f"the cure, {counts['missed']} missed.",
        f"{counts['not built']} more could not be built tiny or run by general inputs, and are not counted.",
        "",
        "A model that is refused raises when the `with` block ends, and says which layers gave nothing; others may",
        "still be watched by `layers=`:",
        "",
        "```python",
        ">>> import torch, regard",
        ">>> class Attention(torch.nn.Linear):",
        "...     def forward(self, x):",
        "...         return (x @ super().forward(x).mT).softmax(-1) @ x",
        ">>> model = torch.nn.Sequential(Attention(8, 8))",
        ">>> try:",
        "...     with regard.watch(model):",
        "...         _ = model(torch.ones(1, 3, 8))",
        "... except regard.lens.NotSeen as error:",
        "...     print(error.received.split(': ')[1])",
        "Attention computes its weights by itself, past every name that is watched",
        "```",
        "",
        "| model | | |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {found} | {said.replace('|', ' ')} |"
        for _, name, found, said in rows
        if found != "not built"
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
