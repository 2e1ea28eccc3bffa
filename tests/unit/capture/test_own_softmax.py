"""Layers that compute their own softmax are read: weights bit-equal to the model's, outputs unchanged."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import regard  # noqa: E402
from regard import NotCapturedError  # noqa: E402
from regard.capture import own_softmax, patching, watchers  # noqa: E402
from regard.capture.compact_mask import find_mask  # noqa: E402

# DeBERTa uses torch.jit.script when its file is imported. The category depends on the versions of torch and Python.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*torch.jit.script:{category}")
    for category in ("DeprecationWarning", "FutureWarning")
]

TOKENS = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
ATTENTION_MASK = torch.ones_like(TOKENS)
ATTENTION_MASK[1, 8:] = 0
X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))

BERT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
DEBERTA = {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
GPT = {"vocab_size": 99, "n_layer": 2, "n_head": 4}
# Model and configuration of each family, by name.
FAMILIES = {
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "n_embd": 32, "n_positions": 64, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 99,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 64,
        },
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**GPT, "hidden_size": 32}),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 99, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    ),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {"vocab_size": 99, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    ),
    "deberta": ("DebertaModel", "DebertaConfig", DEBERTA),
    "deberta_v2": ("DebertaV2Model", "DebertaV2Config", DEBERTA),
    "mpnet": ("MPNetModel", "MPNetConfig", BERT),
    "megatron_bert": ("MegatronBertModel", "MegatronBertConfig", BERT),
    "roformer": ("RoFormerModel", "RoFormerConfig", BERT),
    "ibert": ("IBertModel", "IBertConfig", BERT),  # softmax and product in modules of their own
    "xlnet": (
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    "xlm": ("XLMModel", "XLMConfig", {"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
}
# GPT-Neo masks other keys if its local layers read a static cache.
DECODERS = [(family, None) for family in ("gptj", "gpt_neo", "bloom", "xglm")]
DECODERS += [(family, "static") for family in ("gptj", "bloom", "xglm")]


@pytest.fixture(autouse=True)
def check_nothing_stays_patched():
    before = (torch.softmax, torch.exp)
    yield
    assert before == (torch.softmax, torch.exp) and not {"softmax", "exp"} & vars(torch.Tensor).keys()
    assert not watchers.watched and not patching.list_patches() and not own_softmax._open_traces


def build(family):
    model_class, config_class, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()
    with torch.no_grad():  # larger weights, so that heads differ
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


def list_tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    return [tensor for part in parts for tensor in list_tensors(part)]


class Unfused(nn.Module):
    """Attention as timm computes it without a fused kernel."""

    def __init__(self, attn_drop=0.0):
        super().__init__()
        self.num_heads, self.scale = 4, 8**-0.5
        self.qkv, self.proj, self.attn_drop = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(attn_drop)

    def project(self, x):
        batch, length, _ = x.shape
        return self.qkv(x).reshape(batch, length, 3, self.num_heads, 8).permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, query, key, value):
        return self.attn_drop(((query * self.scale) @ key.transpose(-2, -1)).softmax(dim=-1)) @ value

    def forward(self, x):
        return self.proj(self.attend(*self.project(x)).transpose(1, 2).reshape(x.shape))


class NanoGPT(Unfused):
    """Causal attention as nanoGPT computes it without flash attention."""

    def attend(self, query, key, value):
        length = query.shape[-2]
        scores = (query @ key.transpose(-2, -1)) * (1.0 / query.shape[-1] ** 0.5)
        scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
        return self.attn_drop(F.softmax(scores, dim=-1)) @ value


class Merged(Unfused):
    """Batch and heads on one axis, the value on the left."""

    def attend(self, query, key, value):
        query, key, value = (part.flatten(0, 1) for part in (query, key, value))
        weights = torch.bmm(query * self.scale, key.mT).softmax(-1)
        return torch.bmm(value.mT, weights.permute(0, 2, 1)).mT.unflatten(0, (-1, 4))


class Einsum(Unfused):
    """Cast, mask after the softmax, sequence first."""

    def attend(self, query, key, value):
        scores = torch.einsum("bhid,bhjd->ijbh", query * self.scale, key)
        weights = torch.softmax(scores.double(), 1).to(scores.dtype)
        weights = weights.masked_fill(torch.zeros(7, 7, 1, 1, dtype=torch.bool), 0.0)
        return torch.einsum("ijbh,bhjd->ibhd", weights, value).permute(1, 2, 0, 3)


class Exponential(Unfused):
    """A softmax of exponential and sum."""

    def attend(self, query, key, value):
        scores = (query * self.scale) @ key.mT
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)) @ value


class LogSoftmax(Unfused):
    """The exponential of a log-softmax, which no division follows."""

    def attend(self, query, key, value):
        return ((query * self.scale) @ key.mT).log_softmax(-1).exp() @ value


class MultiQuery(Unfused):
    """All heads share one value, and their rows are merged."""

    def attend(self, query, key, value):
        batch, heads, length, _ = query.shape
        scores = (query * self.scale).reshape(batch, heads * length, -1) @ key[:, 0].mT
        weights = scores.view(batch, heads, length, length).softmax(-1)
        merged = weights.view(batch, heads * length, length) @ value[:, 0]
        return merged.view(batch, heads, length, -1)


class OverQueries(Unfused):
    """A softmax over the wrong axis."""

    def attend(self, query, key, value):
        return ((query * self.scale) @ key.mT).softmax(-2) @ value


class Slots(Unfused):
    """Slot attention: a softmax over the queries, whose rows are then divided by their sums."""

    def attend(self, query, key, value):
        weights = ((query * self.scale) @ key.mT).softmax(-2)
        return (weights / weights.sum(-1, keepdim=True)) @ value


class CrossCovariance(Unfused):
    """Attention of channels, as XCiT computes it."""

    def forward(self, x):
        query, key, value = (part.mT for part in self.project(x))  # (batch, heads, channels, tokens)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        attended = self.attend(query, key, value)
        return self.proj(attended.permute(0, 3, 1, 2).reshape(x.shape))


class Transposed(nn.Module):
    """Attention of channels over an image, as Restormer computes it."""

    def __init__(self, merge_batch=False):
        super().__init__()
        self.qkv, self.proj, self.merge_batch = nn.Conv2d(32, 96, 1), nn.Conv2d(32, 32, 1), merge_batch

    def forward(self, x):
        query, key, value = self.qkv(x).flatten(2).chunk(3, 1)
        split = (-1, 8) if self.merge_batch else (len(x), 4, 8)
        query, key, value = (part.reshape(*split, part.shape[-1]) for part in (query, key, value))
        attended = (query @ key.mT).softmax(-1) @ value
        if self.merge_batch:
            attended = attended.view(len(x), 4, 8, -1)
        return self.proj(attended.reshape(x.shape))


class Pixels(Transposed):
    """Attention of the pixels of an image."""

    def forward(self, x):
        query, key, value = (part.unflatten(1, (4, 8)) for part in self.qkv(x).flatten(2).chunk(3, 1))
        weights = (query.mT @ key).softmax(-1)
        return self.proj((value @ weights.mT).reshape(x.shape))


class Windows(Unfused):
    """One head, in windows of four tokens on an axis of their own."""

    def forward(self, x):
        query, key, value = (part.unflatten(1, (-1, 4)) for part in self.qkv(x).chunk(3, -1))
        return self.proj(((query @ key.mT).softmax(-1) @ value).reshape(x.shape))


class LateDivision(Unfused):
    """The output is divided by the sums, so there are no weights."""

    def attend(self, query, key, value):
        weights = ((query * self.scale) @ key.mT).exp()
        return (weights @ value) / weights.sum(-1, keepdim=True)


def compute_weights(layer, x):
    query, key, _ = layer.project(x)
    if isinstance(layer, MultiQuery):
        key = key[:, :1]
    scores = (query * layer.scale) @ key.mT
    if isinstance(layer, Slots):
        return scores.softmax(-2) / scores.softmax(-2).sum(-1, keepdim=True)
    if isinstance(layer, NanoGPT):
        scores = scores.masked_fill(torch.ones(7, 7).tril() == 0, float("-inf"))
    return scores.softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_of_the_model_and_outputs_are_unchanged(family):
    model, inputs = build(family), {"input_ids": TOKENS, "attention_mask": ATTENTION_MASK}
    plain, eager = model(**inputs), model(**inputs, output_attentions=True).attentions
    with regard.watch(model, values=True) as recording:
        watched = model(**inputs)
    pairs = list(zip(list_tensors(plain), list_tensors(watched), strict=True))
    assert pairs and all(torch.equal(a, b) and type(b) is torch.Tensor for a, b in pairs)
    assert len(recording) == len(eager) == 2
    for layer, weights in zip(recording, eager, strict=True):
        (call,) = recording.calls(layer)
        assert torch.equal(recording[layer].to_dense(), weights)
        torch.testing.assert_close(call.matrix @ call.value, call.output)
    # A mask may give padded rows equal weights, so only tokens are checked.
    assert not recording.diagnose(attention_mask=ATTENTION_MASK).by_severity("error")


@pytest.mark.parametrize(
    "layer", [Unfused, NanoGPT, Merged, Einsum, Exponential, LogSoftmax, MultiQuery, Slots]
)
def test_every_way_to_write_it_is_read(layer):
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": layer()})
    expected = model["first"](X)
    with regard.watch(model, values=True) as recording:
        assert torch.equal(model["first"](X), expected)
    (call,) = recording.calls("first")
    assert call.shape == (2, 4, 7, 7) and call.kernel == "own softmax of the layer"
    torch.testing.assert_close(recording["first"].to_dense(), compute_weights(model["first"], X))
    torch.testing.assert_close(call.matrix @ call.value, call.output)
    by_hand = model["first"].proj(call.output.transpose(1, 2).flatten(2))
    torch.testing.assert_close(by_hand, expected)


def test_masks_are_found_from_the_weights():
    model = nn.Sequential(Unfused())
    with regard.watch(model) as recording:
        model(torch.ones(2, 7, 32))
    assert torch.equal(recording["0"].to_dense(), torch.full((2, 4, 7, 7), 1 / 7))
    assert recording.calls("0")[0].mask is None
    scores = torch.zeros(2, 4, 7, 7).masked_fill(torch.ones(7, 7).tril() == 0, torch.finfo().min)
    scores[1, ..., :3] = torch.finfo().min  # padded on the left: the first rows get equal weights
    mask = find_mask(scores.softmax(-1))
    assert mask.uniform_keys.tolist() == [[[0] * 7], [[7] * 3 + [0] * 4]]
    assert mask.stop.tolist() == [[[1, 2, 3, 4, 5, 6, 7]], [[0, 0, 0, 4, 5, 6, 7]]]
    assert mask.start.tolist() == [[[0] * 7], [[0, 0, 0, 3, 3, 3, 3]]]


def test_weights_are_recorded_without_dropout():
    torch.manual_seed(0)
    model = nn.Sequential(Unfused(attn_drop=0.5)).train()
    torch.manual_seed(1)
    expected = model(X)
    with regard.watch(model) as recording:
        torch.manual_seed(1)
        assert torch.equal(model(X), expected)
    (call,) = recording.calls("0")
    assert call.dropout_p == 0.5 and call.training
    assert torch.equal(call.weights, compute_weights(model[0], X))
    assert not recording.diagnose().by_severity("error")


def test_gradients_are_unchanged():
    model = nn.Sequential(Unfused(), Merged())
    model(X).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with regard.watch(model):
        model(X).square().sum().backward()
    assert all(
        torch.equal(parameter.grad, grad)
        for parameter, grad in zip(model.parameters(), expected, strict=True)
    )


@torch.no_grad()
@pytest.mark.parametrize(("family", "cache"), DECODERS)
def test_steps_of_generate_are_joined(family, cache):
    model = build(family)
    settings = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    try:
        expected = model.generate(TOKENS[:1], **settings)
    except ValueError:
        assert (family, cache) == ("xglm", "static")
        pytest.skip("XGLM of this release does not run with a static cache")
    with regard.watch(model, values=True) as recording:
        tokens = model.generate(TOKENS[:1], **settings)
    assert torch.equal(tokens, expected)
    eager = model(tokens[:, :-1], output_attentions=True).attentions
    for layer, weights in zip(recording, eager, strict=True):
        (call,) = recording.calls(layer)
        assert call.steps == 5 and call.shape == (1, 4, 15, 15)
        torch.testing.assert_close(recording[layer].to_dense(), weights)
        torch.testing.assert_close(call.matrix @ call.value, call.output)
    assert not recording.diagnose().by_severity("error")


@torch.no_grad()
def test_a_recording_with_given_weights_supports_everything(tmp_path):
    model, names = build("gptj"), [f"t{i}" for i in range(11)]
    with regard.watch(model) as recording:
        eager = model(TOKENS, output_attentions=True).attentions
    layer = next(iter(recording))
    A, weights = recording[layer], eager[0]
    assert torch.equal(A[1, 2].to_dense(), weights[1, 2]) and torch.equal(A[1, 2, 5], weights[1, 2, 5])
    assert torch.equal(A[0, 1, 4, [3, 0]], weights[0, 1, 4, [3, 0]])
    torch.testing.assert_close(A.entropy().float(), torch.special.entr(weights).sum(-1))
    torch.testing.assert_close(A.sum(axis=-2).float(), weights.sum(-2))
    assert torch.equal(A.topk(2).values.float(), weights.topk(2).values)
    assert recording.calls(layer)[0].mask == regard.causal()
    row = recording.find("t7", "t3", tokens=names)[0]
    assert row["weight"] == pytest.approx(float(max(w[0, :, 7, 3].max() for w in eager)))
    product = torch.eye(11)
    for weights in eager:
        product = (0.5 * weights[0].mean(0) + 0.5 * torch.eye(11)) @ product
    torch.testing.assert_close(
        torch.tensor(recording.rollout(-1)), product[-1].double(), atol=1e-6, rtol=1e-6
    )
    assert len(recording.heads()) == 8
    assert "given weights" in repr(A) and "t3" in str(A[0, 0].explain(7, tokens=names))
    recording.page(names).save(tmp_path / "page.html")
    recording.save(tmp_path / "recording.safetensors")
    again = regard.load_recording(tmp_path / "recording.safetensors")
    assert all(torch.equal(again[name].to_dense(), recording[name].to_dense()) for name in recording)
    with regard.watch(model, measures={"entropy": regard.Entropy()}) as measured:
        model(TOKENS)
    assert torch.equal(measured.calls(layer)[0].measures["entropy"], A.entropy())


def test_weights_past_the_limit_are_reported_with_their_bytes():
    model = nn.Sequential(Unfused(), Unfused())
    size = 4 * 2 * 4 * 7 * 7
    with (
        pytest.raises(NotCapturedError, match=f"take {size:,} bytes after {size:,} of other calls") as error,
        regard.watch(model, max_dense_bytes=2 * size - 1) as recording,
    ):
        model(X)
    assert "max_dense_bytes" in error.value.hint and list(recording) == ["0"]
    with regard.watch(model, max_dense_bytes=2 * size) as recording:
        model(X)
    assert list(recording) == ["0", "1"]
    with regard.watch(model, max_dense_bytes=0, measures="default") as recording:
        model(X)
    assert list(recording) == ["0", "1"]


@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        (LateDivision, "is divided by its sums only after"),
        (OverQueries, "runs over the queries instead of the keys"),
    ],
)
def test_a_softmax_that_is_not_the_weights_is_reported(layer, fault):
    model = nn.Sequential(Unfused(), layer())
    expected = model(X)
    with (
        pytest.raises(
            NotCapturedError, match=f"'1' was not captured: {layer.__name__} computes .* that {fault}"
        ),
        regard.watch(model) as recording,
    ):
        assert torch.equal(model(X), expected)
    assert list(recording) == ["0"]


class Experts(nn.Module):
    """Outputs of experts, mixed in every way there is."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        mixed = (shares.unsqueeze(-2) @ outputs).squeeze(-2) + torch.einsum("bte,bted->btd", shares, outputs)
        return mixed + (shares[..., None] * outputs).sum(-2)


class Vocabulary(nn.Module):
    """The expected embedding of the next token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)

    def forward(self, x):
        return (x @ self.embedding.weight.T).softmax(-1) @ self.embedding.weight


@pytest.mark.parametrize("other", [Experts, Vocabulary])
@pytest.mark.parametrize("x", [X, X[:1], X[:, :1]], ids=["batch", "one text", "one token"])
def test_a_softmax_that_is_no_attention_is_no_layer(other, x):
    model = nn.Sequential(Unfused(), other())
    expected = model(x)
    with regard.watch(model) as recording:
        watched = model(x)
    assert torch.equal(watched, expected) and type(watched) is torch.Tensor
    assert list(recording) == ["0"] and not recording.diagnose().by_severity("warning")


class Decay(Unfused):
    """A state-space layer without q and k: a value fades by exp(-rate) with each token."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def attend(self, query, key, value):
        distance = torch.arange(7)[:, None] - torch.arange(7)
        decay = torch.exp((-self.rate * distance).masked_fill(distance < 0, -torch.inf).expand(2, 4, 7, 7))
        return decay @ value


@pytest.mark.parametrize("rate", [0.1, 3.0, 12.0, 40.0])
def test_the_decays_of_a_state_space_layer_are_no_weights(rate):
    """If they are strong, each row is a single 1, which the rows of a softmax may be as well."""
    model = nn.Sequential(Unfused(), Decay(rate))
    with regard.watch(model) as recording:
        model(X)
    assert list(recording) == ["0"] and not recording.diagnose().by_severity("warning")


def test_an_exponential_that_the_model_divides_is_read_if_every_row_is_a_single_one():
    layer = Exponential()
    with torch.no_grad():
        layer.qkv.weight[:64].mul_(1e4)  # queries and keys
    model = nn.Sequential(layer)
    with regard.watch(model) as recording:
        model(X)
    (weights,) = (recording[name].to_dense() for name in recording)
    assert bool((weights.amax(-1) == 1).all())


# As many tokens as channels of a head, too.
@pytest.mark.parametrize("length", [7, 8, 9, 16])
def test_the_channels_of_cross_covariance_attention_are_not_taken_for_tokens(length):
    x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(Unfused(), CrossCovariance(), Unfused())
    expected = model(x)
    with regard.watch(model, values=True) as recording, regard.watch(model, measures="default") as measured:
        watched = model(x)
    assert torch.equal(watched, expected) and type(watched) is torch.Tensor
    assert list(recording) == list(measured) == ["0", "2"]
    assert {row["module"] for row in recording.heads()} == {"0", "2"}
    (note,) = (finding for finding in recording.diagnose() if finding.module == "1")
    assert (note.kind, note.severity, note.module) == ("left out", "note", "1") and "channel" in note.message
    with pytest.raises(NotCapturedError, match="between channels"):
        recording["1"]
    assert list(recording.span_mass({"start": slice(0, 2)}).lookback) == ["0", "2"]
    assert "Not captured: 1" in recording._repr_html_()


@pytest.mark.parametrize("merge_batch", [False, True])
def test_the_channels_of_an_image_are_not_taken_for_tokens(merge_batch):
    image = torch.randn(2, 32, 4, 2, generator=torch.Generator().manual_seed(3))  # 8 pixels, 8 channels
    with (
        pytest.warns(
            regard.lens.EmptyRecordingWarning, match="'0' was left out: its weights are between channels"
        ),
        regard.watch(nn.Sequential(model := Transposed(merge_batch))) as recording,
    ):
        watched = model(image)
    assert type(watched) is torch.Tensor and torch.equal(watched, model(image)) and not len(recording)


def test_pixels_and_windows_are_tokens():
    image = torch.randn(2, 32, 4, 2, generator=torch.Generator().manual_seed(3))
    pixels, windows = Pixels(), Windows()
    with regard.watch(nn.ModuleList([pixels, windows])) as recording:
        pixels(image)
        windows(X[:, :4].repeat(1, 3, 1))
    assert [recording[name].shape for name in recording] == [(2, 4, 8, 8), (2, 3, 4, 4)]
    query, key, _ = (part.unflatten(1, (4, 8)) for part in pixels.qkv(image).flatten(2).chunk(3, 1))
    assert torch.equal(recording["0"].to_dense(), (query.mT @ key).softmax(-1))


def test_edits_of_channels_are_refused_and_have_no_number():
    model = nn.Sequential(Unfused(), CrossCovariance(), Unfused())
    with (
        pytest.raises(NotCapturedError, match=r"an edit of '1', .* its weights are between channels"),
        regard.intervene(model, regard.interventions.ablate("1", heads=0)),
    ):
        model(X)
    with regard.intervene(model, regard.interventions.ablate(0, heads=0)) as run:
        model(X)
    assert [row["module"] for row in run.applied] == ["0"]


@torch.no_grad()
def test_state_space_layers_of_a_hybrid_model_are_no_layers():
    sizes = {**BERT, "num_hidden_layers": 3, "num_key_value_heads": 2, "attn_layer_indices": [1]}
    sizes |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
    torch.manual_seed(0)
    model = transformers.BambaForCausalLM(transformers.BambaConfig(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.25)  # strong decays
    for tokens in (TOKENS, TOKENS[:, :1]):
        with regard.watch(model) as recording:
            model(tokens)
        assert list(recording) == ["model.layers.1.self_attn"]


@torch.no_grad()
def test_routers_of_a_mixture_of_experts_are_no_layers():
    sizes = {**BERT, "num_key_value_heads": 2, "num_local_experts": 4}
    mixtral = transformers.MixtralModel(transformers.MixtralConfig(**sizes)).eval()
    sizes = {
        "vocab_size": 99,
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_heads": 4,
        "num_layers": 2,
        "num_experts": 4,
    }
    config = transformers.SwitchTransformersConfig(
        **sizes, num_sparse_encoder_layers=2, is_encoder_decoder=False
    )
    switch = transformers.SwitchTransformersEncoderModel(config).eval()
    for model in (mixtral, switch):
        expected = model(TOKENS, output_router_logits=True)
        with regard.watch(model) as recording:
            watched = model(TOKENS, output_router_logits=True)
        pairs = zip(list_tensors(expected), list_tensors(watched), strict=True)
        assert all(torch.equal(a, b) and type(b) is torch.Tensor for a, b in pairs)
        assert len(recording) == 2 and all(
            "attention" in name.lower() or "attn" in name for name in recording
        )
        # In transformers 5.0 and 5.10 Switch Transformers computes its own softmax.
        is_own = not hasattr(sys.modules[type(model).__module__], "eager_attention_forward")
        assert [recording.calls(name)[0].weights is not None for name in recording] == [is_own] * 2
        assert model is switch or not is_own


def test_no_layer_is_read_twice():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    config = transformers.LlamaConfig(**BERT, attn_implementation="eager")
    llama = transformers.LlamaModel(config).eval()
    with regard.watch(nn.ModuleDict({"layer": layer, "llama": llama})) as recording:
        layer(X, X, X, need_weights=True)
        llama(TOKENS)
    assert len(recording) == 3
    for name in recording:
        (call,) = recording.calls(name)
        assert call.weights is None and call.query.shape[-1] == 8


def flatten_product(function):
    """Return a batched product as one of matrices with several leading axes."""
    return lambda weights, value: function(weights.flatten(0, 1), value.flatten(0, 1)).unflatten(0, (2, 4))


@pytest.mark.parametrize(
    "multiply",
    [
        lambda weights, value: torch.matmul(weights, other=value),
        lambda weights, value: torch.matmul(other=value, input=weights),
        lambda weights, value: torch.matmul(value.mT, other=weights.mT).mT,
        lambda weights, value: weights.matmul(other=value),
        flatten_product(lambda weights, value: torch.bmm(weights, mat2=value)),
        flatten_product(lambda weights, value: torch.baddbmm(torch.zeros(1), batch2=value, batch1=weights)),
    ],
)
def test_products_with_keyword_arguments(multiply):
    class Layer(nn.Module):
        def forward(self, query, key, value):
            return multiply(torch.softmax(query @ key.mT, -1), value)

    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    layer = Layer()
    with regard.watch(nn.Sequential(layer)) as recording:
        layer(query, key, value)
    torch.testing.assert_close(recording["0"].to_dense(), torch.softmax(query @ key.mT, -1))
