"""QK-clip: heads above the limit get it as their largest score, other heads and all values keep every bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard.nn
from examples.qk_clip import train
from regard.errors import ArgumentError, ArgumentTypeError
from regard.learn.gpt import GPT, GPTConfig
from regard.monitor import ClippedHead, Monitor, qk_clip
from tests.helpers.nightly import keep_in_ci
from tests.helpers.parallel_clip import clip_in_one_process, clip_part
from tests.unit.monitor.test_distributed import ATTENTION, run_processes

hf = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402

from tests.unit.policy.test_cache_families import FAMILIES, build  # noqa: E402

HEADS, N, WIDTH = 4, 9, 32
TOLERANCE = 1e-5  # relative; of float32


class Projected(list[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """The query, key, value and float64 scores of each call of SDPA."""

    @contextmanager
    def record(self) -> Iterator[None]:
        original = F.scaled_dot_product_attention

        def attend(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kw: Any
        ) -> Tensor:
            groups = query.shape[-3] // key.shape[-3]
            scale = kw.get("scale") or query.shape[-1] ** -0.5
            scores = query.double() @ key.double().repeat_interleave(groups, -3).mT * scale
            if attn_mask is not None:
                visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1
                scores = scores.masked_fill(~visible, -math.inf)
            if kw.get("is_causal"):
                scores = scores.masked_fill(
                    ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf
                )
            self.append((query.clone(), key.clone(), value.clone(), scores))
            return original(query, key, value, attn_mask, *args, **kw)

        with mock.patch.object(F, "scaled_dot_product_attention", attend):
            yield


@contextmanager
def record_inputs(model: nn.Module, names: set[str]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Record the inputs of modules, so that they can run again alone."""
    inputs: dict[str, tuple[Any, Any]] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: inputs.update({name: (args, kwargs)}), with_kwargs=True
        )
        for name in names
    ]
    yield inputs
    for hook in hooks:
        hook.remove()


def run_again(model: nn.Module, inputs: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Tensor, ...]]:
    """Run modules alone on recorded inputs, and return the query, key, value and scores of each."""
    found = {}
    for name, (args, kwargs) in inputs.items():
        calls = Projected()
        with calls.record(), torch.no_grad():
            model.get_submodule(name)(*args, **kwargs)
        [found[name]] = calls
    return found


def assert_exact_clip(
    model: nn.Module, run: Callable[[], Any], rope_dims: int = 0, is_shared: bool = False, **options: Any
) -> list[ClippedHead]:
    """Clip at the median score; compare queries, keys, values and scores of each layer on the same inputs.

    Args:
        model: The model.
        run: Runs it.
        rope_dims: Last dimensions of a key that all heads share (MLA).
        is_shared: Whether several heads share a key; models may repeat the keys.
        options: Further arguments of `qk_clip`.
    """
    model.train()
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        run()
        monitor.step()
        rows = list(monitor.last_rows)
        scores = sorted(row["max_score"] for row in rows)
        tau = scores[len(scores) // 2]
        monitored = {(row["module"], row["head"]): row["max_score"] for row in rows}
        with record_inputs(model, {row["module"] for row in rows}) as inputs:
            run()
        before, weights = run_again(model, inputs), {k: v.clone() for k, v in model.state_dict().items()}
        clipped = qk_clip(model, monitor, tau, **options)
        assert qk_clip(model, monitor, tau, **options) == []  # the same numbers do not clip twice
    after = run_again(model, inputs)
    factors = {(found.module, found.head): found.factor for found in clipped}
    assert factors.keys() == {place for place, score in monitored.items() if score > tau}
    assert 0 < len(factors) < len(monitored)
    for (name, head), score in monitored.items():
        (query, key, value, scores_before), (query_after, key_after, value_after, scores_after) = (
            before[name],
            after[name],
        )
        assert scores_before[:, head].max().item() == pytest.approx(score, rel=TOLERANCE)
        groups = query.shape[1] // key.shape[1]
        expected_query, expected_key = query[:, head], key[:, head // groups]
        if (name, head) in factors:
            factor = factors[name, head]
            assert factor == pytest.approx(tau / score)
            assert scores_after[:, head].max().item() == pytest.approx(tau, rel=TOLERANCE)
            by_query, by_key = (factor, 1.0) if is_shared else (factor**0.5, factor**0.5)
            powers = torch.full_like(query[0, 0, 0], by_query), torch.full_like(key[0, 0, 0], by_key)
            if rope_dims:
                powers[0][-rope_dims:], powers[1][-rope_dims:] = factor, 1.0
            expected_query, expected_key = expected_query * powers[0], expected_key * powers[1]
            torch.testing.assert_close(query_after[:, head], expected_query, rtol=TOLERANCE, atol=1e-5)
            torch.testing.assert_close(key_after[:, head // groups], expected_key, rtol=TOLERANCE, atol=1e-5)
            if rope_dims:
                assert torch.equal(key_after[:, head, :, -rope_dims:], key[:, head, :, -rope_dims:])
        else:
            assert torch.equal(query_after[:, head], expected_query)
            assert torch.equal(scores_after[:, head], scores_before[:, head])
        if is_shared or (name, head) not in factors:
            assert torch.equal(key_after[:, head // groups], key[:, head // groups])
        assert torch.equal(value_after, value)
    for name, weight in model.state_dict().items():
        if not any(name.startswith(f"{module}.") for module, _ in factors):
            assert torch.equal(weight, weights[name]), name
    return clipped


def enlarge(model: nn.Module) -> nn.Module:
    """Add noise to all parameters, biases included, so that scores are large and differ between heads."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return model


SIZES = {
    "vocab_size": 61, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EQUAL, GROUPED, MULTI_QUERY = ({"num_key_value_heads": count} for count in (HEADS, 2, 1))
LATENT = {
    **EQUAL, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 2,
}  # fmt: skip
DROPOUTS = ("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
SUPPORTED = {
    "Llama, equal heads": ("Llama", EQUAL),
    "Llama, grouped heads": ("Llama", GROUPED),
    "Mistral, one key head": ("Mistral", {**MULTI_QUERY, "head_dim": 12, "sliding_window": 4}),
    "Qwen2, biases": ("Qwen2", EQUAL),
    "OPT": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": WIDTH}),
    "BERT": ("Bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "GPT-2": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "Phi-3, equal heads": ("Phi3", EQUAL),
    "Phi-3, grouped heads": ("Phi3", GROUPED),
    "Falcon, one key head": ("Falcon", {"multi_query": True, "bias": True}),
    "Falcon, by head": ("Falcon", {"multi_query": False, "bias": True}),
    "Falcon, grouped heads": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "GPT-BigCode, one key head": ("GPTBigCode", {"multi_query": True}),
    "GPT-BigCode, by head": ("GPTBigCode", {"multi_query": False}),
    "ModernBERT": ("ModernBert", {"global_attn_every_n_layers": 1}),
    "DeepSeek-V3": ("DeepseekV3", {**LATENT, "q_lora_rank": 12}),
    "DeepSeek-V3, direct queries": ("DeepseekV3", {**LATENT, "q_lora_rank": None}),
    "DeepSeek-V2": ("DeepseekV2", {**LATENT, "q_lora_rank": 12, "head_dim": 4}),
}  # fmt: skip
REFUSED = {
    "Qwen3": ("Qwen3", EQUAL, "q_norm"),
    "Gemma 3": ("Gemma3Text", {**EQUAL, "head_dim": 8}, "q_norm"),
    "OLMo 2": ("Olmo2", EQUAL, "q_norm"),
    "Gemma 2": ("Gemma2", {**EQUAL, "head_dim": 8}, "softcap"),
    "OLMo with limits": ("Olmo", {**EQUAL, "clip_qkv": 8.0}, "clip_qkv"),
    "BLOOM": ("Bloom", {}, "position bias"),
    "MPT": ("Mpt", {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 2}, "position bias"),
    "Falcon with ALiBi": ("Falcon", {"alibi": True}, "position bias"),
    "CodeGen": ("CodeGen", {"rotary_dim": 4}, "not known"),
    "DiffLlama": ("DiffLlama", EQUAL, "norm"),
}  # fmt: skip


def build_transformer(name: str, options: dict[str, Any]) -> tuple[nn.Module, Callable[[], Any]]:
    """Build a tiny model with random weights, and a function that runs it."""
    config = getattr(hf, f"{name}Config")(**{**SIZES, **options}, **dict.fromkeys(DROPOUTS, 0.0))
    config.use_cache = False
    torch.manual_seed(0)
    model = enlarge(hf.AutoModel.from_config(config))
    tokens = torch.randint(3, 61, (2, N), generator=torch.Generator().manual_seed(1))
    return model, lambda: model(input_ids=tokens)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("family", SUPPORTED)
def test_heads_of_transformers_get_the_limit(family: str) -> None:
    name, options = SUPPORTED[family]
    model, run = build_transformer(name, options)
    is_shared = "grouped" in family or "one key" in family
    assert_exact_clip(model, run, options.get("qk_rope_head_dim", 0), is_shared)


@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_scores_are_not_products_are_refused(family: str) -> None:
    name, options, reason = REFUSED[family]
    model, run = build_transformer(name, options)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with Monitor(model.train(), every=1, alarms=(), optimizer=None) as monitor:
        run()
        monitor.step()
    with pytest.raises(ArgumentError, match=reason) as caught:
        qk_clip(model, monitor, 1e-3)
    assert monitor.last_rows[0]["module"] in caught.value.received
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"kdim": WIDTH, "vdim": 16}, {"bias": False}, {"add_bias_kv": True}])
def test_heads_of_torch_get_the_limit(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = enlarge(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options))
    model = nn.ModuleDict({"attention": model})
    query, value = torch.randn(2, N, WIDTH), torch.randn(2, N, options.get("vdim", WIDTH))
    if "kdim" in options:
        assert model["attention"].in_proj_weight is None
    assert_exact_clip(model, lambda: model["attention"](query, query, value, need_weights=False))


def test_heads_of_a_torch_encoder_get_the_limit() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    model, x = (
        enlarge(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)),
        torch.randn(2, N, WIDTH),
    )
    assert {found.module for found in assert_exact_clip(model, lambda: model(x))} <= {
        "layers.0.self_attn",
        "layers.1.self_attn",
    }


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_heads_of_regard_get_the_limit(kv_heads: int) -> None:
    torch.manual_seed(0)
    layer = regard.nn.MultiheadAttention(
        WIDTH, HEADS, num_kv_heads=kv_heads, bias_kv=kv_heads == HEADS, sink="learned"
    )
    model, x = enlarge(nn.ModuleDict({"attention": layer})), torch.randn(2, N, WIDTH)

    def compute_scores() -> Tensor:
        query, key = layer.q_proj(x).double(), layer.k_proj(x).double()
        if layer.bias_k is not None:
            key = torch.cat([key, layer.bias_k.double().expand(2, 1, -1)], 1)
        query, key = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (query, key))
        key = key.repeat_interleave(HEADS // kv_heads, 1)
        return (query @ key.mT / math.sqrt(WIDTH // HEADS)).detach()

    before = compute_scores()
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        layer(x)
        monitor.step()
    largest = before.amax((0, 2, 3))
    tau = largest.sort().values[1].item() * 1.0001
    clipped = {found.head for found in qk_clip(model, monitor, tau)}
    assert clipped == set((largest > tau).nonzero().flatten().tolist()) and len(clipped) == 2
    after = compute_scores()
    for head in range(HEADS):
        if head in clipped:
            assert after[:, head].max().item() == pytest.approx(tau, rel=TOLERANCE)
        else:
            assert torch.equal(after[:, head], before[:, head])


def test_one_head_of_the_course_model_gets_the_limit() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=16, width=16, heads=4, layers=2))
    tokens = torch.randint(16, (2, 12))
    with torch.no_grad():
        model.layers[0].attention.q_proj.weight[4:8] *= 30  # head 1
    optimizer = torch.optim.AdamW(model.parameters(), 0.0, weight_decay=0.0)
    with Monitor(model, every=1, alarms=()) as monitor:
        model(tokens).sum().backward()
        optimizer.step()
        before = monitor.last_rows.filter(layer=0).column("max_score")
        limit = before[1] / 4
        state = {key: value.clone() for key, value in model.state_dict().items()}
        moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
        assert qk_clip(model, monitor, limit) == [ClippedHead("layers.0.attention", 1, pytest.approx(0.25))]
        assert all(
            torch.equal(a, b["exp_avg"]) for a, b in zip(moments, optimizer.state.values(), strict=True)
        )
        for key, value in model.state_dict().items():
            changed = (value != state[key]).flatten(1).any(1) if value.ndim > 1 else value != state[key]
            expected = (
                {4, 5, 6, 7}
                if key in ("layers.0.attention.q_proj.weight", "layers.0.attention.k_proj.weight")
                else set()
            )
            assert set(changed.nonzero().flatten().tolist()) == expected, key
        model(tokens)
        optimizer.step()
    after = monitor.last_rows.filter(layer=0).column("max_score")
    assert after[1] == pytest.approx(limit, rel=TOLERANCE)
    assert after[:1] + after[2:] == before[:1] + before[2:]


def assert_exact_or_refused(model: nn.Module, inputs: dict[str, Any]) -> str:
    """Clip a model at the median score, and monitor its layers again on the same inputs; or return why not."""
    names = {name for name, _ in model.named_modules()}
    calls = {name: [] for name in names}
    with Monitor(model, every=1, alarms=(), optimizer=None, include_eval=True) as monitor, torch.no_grad():
        hooks = [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: calls[name].append((args, kwargs)), with_kwargs=True
            )
            for name, module in model.named_modules()
        ]
        model(**inputs)
        monitor.step()
        for hook in hooks:
            hook.remove()
        before = {(row["module"], row["head"]): row["max_score"] for row in monitor.last_rows}
        scores = sorted(before.values())
        tau = next((score for score in scores[len(scores) // 2 :] if score > 0), 1.0)
        try:
            clipped = {(found.module, found.head) for found in qk_clip(model, monitor, tau)}
        except ArgumentError as error:
            return error.received
        for name in dict.fromkeys(name for name, _ in before):
            for args, kwargs in calls[name]:
                model.get_submodule(name)(*args, **kwargs)
        monitor.step()
    after = {(row["module"], row["head"]): row["max_score"] for row in monitor.last_rows}
    assert after.keys() == before.keys() and clipped == {place for place in before if before[place] > tau}
    for place, score in before.items():
        expected = pytest.approx(tau, rel=TOLERANCE) if place in clipped else score
        assert after[place] == expected, place
    return "exact"


WITHOUT_ATTENTION = {"falcon_mamba", "kimi_linear", "mamba", "rwkv"}  # the last layers of the tiny KimiLinear


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - WITHOUT_ATTENTION))
def test_every_language_model_is_clipped_exactly_or_refused(family: str) -> None:
    config_class = next(found for found in MODEL_FOR_CAUSAL_LM_MAPPING if found.model_type == family)
    tokens = torch.randint(3, 90, (2, N), generator=torch.Generator().manual_seed(0))
    model = build(config_class).requires_grad_(True)
    result = assert_exact_or_refused(model, {"input_ids": tokens, "use_cache": False})
    assert result == "exact" or result.startswith(("layer '", "a monitored step"))


@pytest.mark.filterwarnings("ignore")
def test_a_bias_inside_a_class_of_transformers_is_refused() -> None:
    model = enlarge(hf.BrosModel(hf.BrosConfig(**{**SIZES, "hidden_size": 64}))).double()
    inputs = {"input_ids": torch.arange(3, 3 + N)[None], "bbox": torch.rand(1, N, 4).double()}
    assert "position bias" in assert_exact_or_refused(model.eval(), inputs)


# -- Own classes ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention with projections of any names.

    Args:
        names: Names of the projections: query, key and value, or one for all.
        by_head: Whether the one projection stacks query, key and value within each head.
        change: Applied to query and key.
    """

    def __init__(self, *names: str, by_head: bool = False) -> None:
        super().__init__()
        self.num_heads, self.names, self.by_head = HEADS, names, by_head
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH if len(names) == 3 else 3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.get_submodule(name)(x) for name in self.names]
        if len(parts) == 3:
            query, key, value = (part.unflatten(-1, (HEADS, -1)) for part in parts)
        elif self.by_head:
            query, key, value = parts[0].unflatten(-1, (HEADS, 3, -1)).unbind(-2)
        else:
            query, key, value = parts[0].unflatten(-1, (3, HEADS, -1)).unbind(-3)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(output.transpose(1, 2).flatten(2))


class Normed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        query, key = (F.normalize(part(x), dim=-1)[:, None] for part in (self.q_proj, self.k_proj))
        return x + F.scaled_dot_product_attention(query, key, x[:, None])[:, 0]


def build_own(attention: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return enlarge(nn.Sequential(attention)), torch.randn(2, N, WIDTH)


@pytest.mark.parametrize(
    "names", [("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv")]
)
def test_own_classes_are_read_by_the_names_of_their_projections(names: tuple[str, ...]) -> None:
    model, x = build_own(Attention(*names))
    assert_exact_clip(model, lambda: model(x))


@pytest.mark.parametrize("name", ["c_attn", "qkv"])
@pytest.mark.parametrize("fused", ["stacked", "by_head"])
def test_the_order_of_a_fused_projection_is_an_argument(name: str, fused: str) -> None:
    model, x = build_own(Attention(name, by_head=fused == "by_head"))
    assert_exact_clip(model, lambda: model(x), fused=fused)


def freeze(model: nn.Module) -> None:
    model[0].k_proj.weight.requires_grad_(False)


def share_weight(model: nn.Module) -> None:
    model[0].k_proj.weight = model[0].q_proj.weight


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[0].q_proj)


def replace_linear(model: nn.Module) -> None:
    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    model[0].q_proj = Adapter(WIDTH, WIDTH)


def add_parameter(model: nn.Module) -> None:
    model[0].bias_table = nn.Parameter(torch.zeros(3))


def add_norm(model: nn.Module) -> None:
    model[0].q_norm = nn.Identity()


def make_half_the_heads(model: nn.Module) -> None:
    model[0].num_heads = HEADS // 2


def hide_heads(model: nn.Module) -> None:
    model[0].num_heads = None


@pytest.mark.parametrize(
    "change, reason",
    [
        (freeze, "frozen"),
        (share_weight, "shared"),
        (parametrize, "computed from other parameters"),
        (replace_linear, "Adapter"),
        (add_parameter, "bias_table"),
        (add_norm, "q_norm"),
        (make_half_the_heads, "2 heads"),
        (hide_heads, "without the number of its heads"),
    ],
)
def test_layers_that_could_be_clipped_wrongly_are_refused(
    change: Callable[[nn.Module], None], reason: str
) -> None:
    model, x = build_own(Attention("q_proj", "k_proj", "v_proj"))
    change(model)
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(x)
        monitor.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ArgumentError, match=reason) as caught:
        qk_clip(model, monitor, 1e-3)
    assert "'0'" in caught.value.received and "layers=" in caught.value.hint
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "attention, reason",
    [
        (Normed("q_proj", "k_proj", "v_proj"), "'normalize'"),
        (Attention("qkv"), "fused="),
        (Attention("a", "b", "c"), "not known"),
    ],
)
def test_own_classes_that_are_not_known_are_refused(attention: nn.Module, reason: str) -> None:
    model, x = build_own(attention)
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(x)
        monitor.step()
    with pytest.raises(ArgumentError, match=reason):
        qk_clip(model, monitor, 1e-3)


def test_only_the_step_that_has_just_ended_is_clipped() -> None:
    model, x = build_own(Attention("q_proj", "k_proj", "v_proj"))
    monitor = Monitor(model, every=2, alarms=(), optimizer=None)
    assert qk_clip(model, monitor, 1e-3) == []  # no step so far
    with monitor:
        counts = []
        for _ in range(4):
            model(x)
            monitor.step()
            counts.append(len(qk_clip(model, monitor, max(monitor.last_rows.column("max_score")) / 2)))
    assert counts[0] > 0 and counts[2] > 0 and counts[1] == counts[3] == 0


def test_weights_in_half_precision_are_clipped_up_to_their_rounding() -> None:
    model, x = build_own(Attention("q_proj", "k_proj", "v_proj"))
    model, x, largest = model.bfloat16(), x.bfloat16(), []
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        for _ in range(2):
            model(x)
            monitor.step()
            largest.append(max(monitor.last_rows.column("max_score")))
            qk_clip(model, monitor, largest[0] / 2)
    assert largest[1] == pytest.approx(largest[0] / 2, rel=4 * 2**-8)


def test_scores_that_are_nan_are_an_error() -> None:
    model, x = build_own(Attention("q_proj", "k_proj", "v_proj"))
    with torch.no_grad():
        model[0].q_proj.weight[:8] = math.nan
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(x)
        monitor.step()
    with pytest.raises(ArgumentError, match="head 0, are NaN"):
        qk_clip(model, monitor)


@pytest.mark.parametrize("tau", [0, -1.0, math.inf, math.nan, True, "100"])
def test_a_limit_that_is_not_a_positive_number_is_an_error(tau: Any) -> None:
    model, _ = build_own(Attention("q_proj", "k_proj", "v_proj"))
    with pytest.raises(ArgumentError, match="tau="):
        qk_clip(model, Monitor(model), tau)


def test_wrong_arguments_are_errors() -> None:
    model, x = build_own(Attention("q_proj", "k_proj", "v_proj"))
    monitor = Monitor(model, every=1, alarms=(), optimizer=None)
    with pytest.raises(ArgumentTypeError, match="monitor"):
        qk_clip(model, [])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="fused="):
        qk_clip(model, monitor, fused="rows")  # type: ignore[arg-type]
    with monitor:
        model(x)
        monitor.step()
    with pytest.raises(ArgumentError, match="same model"):
        qk_clip(model[0], monitor)


@pytest.mark.slow
@pytest.mark.nightly
def test_adapters_of_peft_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model, x = build_own(Attention("q_proj", "k_proj", "v_proj"))
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(x)
        monitor.step()
    with pytest.raises(ArgumentError, match="lora"):
        qk_clip(model, monitor, 1e-3)


@pytest.mark.slow
def test_the_example_keeps_scores_near_its_limit() -> None:
    run, other = (train(0.06, 12, limit) for limit in (0.5, None))
    assert run["clips"] > 0 == other["clips"] and max(run["max_score"]) < max(other["max_score"])


# -- Several processes ---------------------------------------------------------------------------------------

SHARDED = (
    ATTENTION
    + """
from regard.monitor import qk_clip
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
kv_heads = 8 if "equal" in way else 4
model = Model()
model.layers = nn.ModuleList(Attention(False, kv_heads) for _ in range(2))
plain = Model()
plain.layers = nn.ModuleList(Attention(False, kv_heads) for _ in range(2))
with torch.no_grad():
    model.layers[-1].q_proj.weight[48:56] *= 300  # head 6 of the last layer
    model.layers[0].q_proj.weight[:8] *= 200
plain.load_state_dict(model.state_dict())
x = torch.randn(12, 11, 32)
splits = 1 if "fsdp" in way and "heads" not in way else size if "fsdp" not in way else 2
mesh = init_device_mesh("cpu", (size // splits, splits), mesh_dim_names=("data", "heads"))
if splits > 1:
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"out": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["heads"], plan)
if "fsdp" in way:
    from torch.distributed.fsdp import fully_shard
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
found = []
for trained, own in ((plain, x), (model, x.chunk(size // splits)[mesh.get_coordinate()[0]])):
    optimizer = torch.optim.SGD(trained.parameters(), 0.0)
    group = dist.new_group([rank], use_local_synchronization=True) if trained is plain else None
    with Monitor(trained, every=1, alarms=(), process_group=group) as monitor:
        trained(own).sum().backward()
        optimizer.step()
        found.append([list(clipped) for clipped in qk_clip(trained, monitor, 3.0)])
whole = {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
kinds = sorted({str(value.placements) for value in model.state_dict().values() if isinstance(value, DTensor)})
errors = {name: (whole[name] - value).abs().max().item() for name, value in plain.state_dict().items() if name in whole}
finish(found=found, errors=errors, kinds=kinds)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, way",
    keep_in_ci(
        [
            (2, "fsdp, equal heads"),
            (3, "fsdp, grouped"),
            (2, "tensor parallel, equal"),
            (4, "tensor parallel, grouped"),
            (4, "fsdp of heads, equal"),
        ],
        (2, "tensor parallel, equal"),
    ),
)
def test_each_process_clips_its_own_shard(size: int, way: str, tmp_path: Path) -> None:
    for result in run_processes(size, SHARDED, way, tmp_path):
        plain, sharded = result["found"]
        assert [found[:2] for found in plain] == [found[:2] for found in sharded]
        assert ["layers.0", 0] in [found[:2] for found in plain] and 2 <= len(plain) < 16
        assert [found[2] for found in sharded] == pytest.approx([found[2] for found in plain], rel=1e-4)
        assert any("Shard" in kind for kind in result["kinds"]), result["kinds"]
        assert result["errors"].keys() >= {"layers.0.q_proj.weight", "layers.1.k_proj.weight"}
        assert max(result["errors"].values()) < 1e-4


PARTS = [
    ("GPT-2", "data"),
    ("Llama", "data"),
    ("Llama", "heads"),
    ("Llama", "transformers"),
    ("Llama", "both"),
    ("DeepSeek-V3", "data"),
    ("DeepSeek-V3", "heads"),
    ("DeepSeek-V3", "both"),
]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name, way", PARTS)
def test_models_of_transformers_are_clipped_as_in_one_process(ranks: Any, name: str, way: str) -> None:
    clipped, state, tau = clip_in_one_process(name)
    assert len(clipped) == 6 and len({found.module for found in clipped}) == 2
    for result in filter(None, ranks.run(clip_part, name, way, tau)):
        assert [found[:2] for found in result["clipped"]] == [found[:2] for found in clipped]
        for found, expected in zip(result["clipped"], clipped, strict=True):
            assert found.factor == pytest.approx(expected.factor, rel=1e-9)
        for key, value in state.items():
            torch.testing.assert_close(result["state"][key], value, rtol=1e-9, atol=1e-12, msg=key)
