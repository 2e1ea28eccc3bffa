"""Models and caches that users write themselves, recorded and compared with a softmax in float64."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import regard  # noqa: E402
from regard.capture import cache_store  # noqa: E402
from regard.engines import torch_kernels  # noqa: E402

WIDTH, HEADS = 16, 4


class Attention(nn.Module):
    """Projections around a function that keeps the cache; it logs what it calls attention with."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.log = []

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def project_keys(self, x):
        return self.split(self.key(x)), self.split(self.value(x))

    def forward(self, x, update):
        query, key, value, mask = self.split(self.query(x)), *update(x)
        self.log.append((query.clone(), key.clone(), None if mask is None else mask.clone()))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + out.transpose(1, 2).flatten(2)


def compute_weights(query, key, mask):
    scores = query.double() @ key.double().mT / query.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)


def stack_rows(log, kv_len):
    """Stack the weights of some calls of one sequence."""
    rows = [compute_weights(*entry)[..., :kv_len] for entry in log]
    return torch.cat([F.pad(row, (0, kv_len - row.shape[-1])) for row in rows], -2)


def assert_rows(call, expected):
    assert call.shape == tuple(expected.shape)
    torch.testing.assert_close(call.matrix.to_dense().double(), expected, atol=1e-5, rtol=0)


def cause(q_len, kv_len, filled):
    """Mask the keys after each of the newest queries, and those of a buffer that are not filled."""
    return torch.arange(kv_len) <= torch.arange(filled - q_len, filled)[:, None]


class Layer(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.attn = Attention()

    def forward(self, x, update, past_key_values=None):
        return self.attn(x, update)


class Buffer:
    """A buffer of a given length that is passed as a whole; a ring starts again at its first key."""

    def __init__(self, layer, length, is_ring=False, shared_mask=False):
        self.layer, self.length, self.is_ring, self.filled = layer, length, is_ring, 0
        self.key, self.value = (torch.zeros(1, HEADS, length, WIDTH // HEADS) for _ in range(2))
        self.mask = torch.zeros(1, length, dtype=torch.bool) if shared_mask else None

    def __call__(self, x):
        places = (self.filled + torch.arange(x.shape[1])) % self.length
        self.filled += x.shape[1]
        self.key[:, :, places], self.value[:, :, places] = self.layer.attn.project_keys(x)
        mask = cause(x.shape[1], self.length, self.filled)
        if self.mask is not None and x.shape[1] == 1:
            mask = self.mask.copy_(mask)
        return self.key, self.value, None if self.is_ring and self.filled > self.length else mask


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shared_mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_that_the_next_prompt_overwrites(mode, shared_mask, dtype):
    """In inference mode, no tensor tells that it was overwritten."""
    layer = Layer().to(dtype)
    x = torch.randn(3, 1, 9, WIDTH, dtype=dtype)
    with mode(), regard.watch(layer) as recording:
        buffer = Buffer(layer, 12, shared_mask=shared_mask)
        buffer.key, buffer.value = buffer.key.to(dtype), buffer.value.to(dtype)
        for tokens in x:
            buffer.filled = 0
            for part in (tokens[:, :4], *tokens[:, 4:].split(1, 1)):
                layer(part, buffer)
    calls = recording.calls("attn")
    assert len(calls) == 3
    for i, call in enumerate(calls):
        expected = stack_rows(layer.attn.log[6 * i : 6 * i + 6], 9)
        if dtype == torch.float32:
            assert_rows(call, expected)
        else:
            assert (call.matrix.to_dense().double() - expected).abs().max() < 0.02


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_ring_buffer_keeps_every_row_and_is_no_fault(mode):
    layer = Layer()
    x = torch.randn(1, 21, WIDTH)
    with mode(), regard.watch(layer) as recording:
        buffer = Buffer(layer, 8, is_ring=True)
        for part in (x[:, :5], *x[:, 5:].split(1, 1)):
            layer(part, buffer)
    first, *others = recording.calls("attn")
    assert_rows(first, stack_rows(layer.attn.log[:4], 8))
    assert len(others) == 13
    for call, entry in zip(others, layer.attn.log[4:], strict=True):
        assert_rows(call, compute_weights(*entry))
    assert not [finding for finding in recording.diagnose() if finding.kind.startswith("cache")]


def append_to(keys, attn, window=None):
    """Return a function that appends to `keys`, a list, and keeps the newest `window` of them."""

    def update(x):
        new = attn.project_keys(x)
        keys[:] = [torch.cat(pair, 2) for pair in zip(keys, new, strict=True)] if keys else new
        q_len, kv_len = x.shape[1], keys[0].shape[2]
        if window is not None and q_len == 1:
            keys[:] = [each[:, :, -window:] for each in keys]
        return *keys, cause(q_len, kv_len, kv_len) if q_len > 1 else None

    return update


@dataclass
class ComparableCache:
    keys: list


class SlottedCache:
    __slots__ = ("keys",)


@pytest.mark.parametrize(
    "build",
    [
        list,
        dict,
        tuple,
        SlottedCache,
        lambda: ComparableCache([torch.zeros(2, 3)]),
        lambda: torch.zeros(2, 3),
    ],
    ids=["list", "dict", "tuple", "slots", "dataclass", "tensor"],
)
def test_a_cache_may_be_any_object(build):
    """Some have no weak references, and some compare by tensors."""
    layer = Layer()
    x = torch.randn(2, 1, 7, WIDTH)
    with torch.no_grad(), regard.watch(layer) as recording:
        caches = [build(), build()]  # both exist until the end
        for tokens, cache in zip(x, caches, strict=True):
            update = append_to([], layer.attn)
            for part in (tokens[:, :4], *tokens[:, 4:].split(1, 1)):
                layer(part, update, past_key_values=cache)
    assert len(recording.calls("attn")) == 2
    for i, call in enumerate(recording.calls("attn")):
        assert_rows(call, stack_rows(layer.attn.log[4 * i : 4 * i + 4], 7))


class FilledByData(Attention):
    """A layer whose cache is one array, written in a way that no version counts; it passes views of it."""

    def __init__(self, change=lambda *tensors: tensors):
        super().__init__()
        self.cache, self.filled, self.change = torch.zeros(2, 2, HEADS, 16, WIDTH // HEADS), 0, change

    def forward(self, x):
        start, self.filled = self.filled, self.filled + x.shape[1]
        self.cache.data[..., start : self.filled, :] = torch.stack(self.project_keys(x))
        query, key, value = self.change(self.split(self.query(x)).clone(), *self.cache[..., : self.filled, :])
        self.log.append((query.clone(), key.clone(), cause(x.shape[1], self.filled, self.filled)))
        return F.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)


@pytest.mark.parametrize(
    "change, later",
    [
        (lambda *tensors: tensors, torch.inference_mode),
        (lambda query, key, value: (query, key, torch._neg_view(value)), torch.no_grad),
        (lambda query, key, value: (query, torch._neg_view(key), value), torch.no_grad),
        (lambda *tensors: [tensor[:0] for tensor in tensors], torch.no_grad),
        (lambda query, key, value: (query, key, value[..., :0]), torch.no_grad),
    ],
    ids=["inference later", "negative value", "negative key", "empty batch", "empty value"],
)
def test_steps_of_unusual_tensors(change, later):
    torch.manual_seed(0)
    layer, x = FilledByData(change).eval(), torch.randn(2, 11, WIDTH)
    with regard.watch(layer) as recording:
        for step, part in enumerate((x[:, :4], *x[:, 4:].split(1, 1))):
            with later() if step > 3 else torch.no_grad():
                layer(part)
    calls = recording.calls("")
    assert sum(call.shape[-2] for call in calls) == 11
    rows = torch.cat([F.pad(call.matrix.to_dense(), (0, 11 - call.shape[-1])) for call in calls], -2)
    torch.testing.assert_close(rows.double(), stack_rows(layer.log, 11), atol=1e-5, rtol=0)


def test_a_query_that_is_overwritten_after_any_step_is_refused():
    torch.manual_seed(0)
    layer, keys, x = Layer().eval(), [], torch.randn(1, 12, WIDTH)
    queries = []
    layer.attn.split = lambda x: queries.append(Attention.split(layer.attn, x).clone()) or queries[-1]
    with torch.no_grad(), regard.watch(layer) as recording:
        for step, part in enumerate((x[:, :4], *x[:, 4:].split(1, 1))):
            layer(part, append_to(keys, layer.attn))
            if step == 4:
                queries[-3].mul_(3)  # of query, key, value
    with pytest.raises(regard.ArgumentError, match="the model overwrote after the call"):
        recording["attn"].to_dense()


def test_another_thread_takes_the_same_step_while_the_kernel_runs(monkeypatch):
    """No cache object tells the texts apart, so each may continue the rows of the other."""
    torch.manual_seed(0)
    layer, x = Layer().eval(), torch.randn(1, 12, WIDTH)
    parts = (x[:, :4], *x[:, 4:].split(1, 1))
    first, second = (append_to([], layer.attn) for _ in range(2))
    run_kernel, waiting = torch_kernels.rerun_flash_with_lse, []

    def run_other_first(*args):
        while waiting:
            thread = threading.Thread(target=take_step, args=(waiting.pop(), first))
            thread.start()
            thread.join()
        return run_kernel(*args)

    @torch.no_grad()
    def take_step(part, update):
        layer(part, update)

    monkeypatch.setattr(torch_kernels, "rerun_flash_with_lse", run_other_first)
    with regard.watch(layer) as recording:
        for part in parts[:6]:
            take_step(part, first)
        for i, part in enumerate(parts):
            if i == 6:
                waiting.append(part)
            take_step(part, second)
        assert not waiting  # the step was a fast one
        for part in parts[7:]:
            take_step(part, first)
    calls = recording.calls("attn")
    assert [call.shape[-2:] for call in calls] == [(12, 12)] * 2
    expected = stack_rows(layer.attn.log[6:13] + layer.attn.log[14:16], 12)
    for call in calls:
        assert_rows(call, expected)


class SharedDecoder(nn.Module):
    """A decoder that runs one layer several times, each time with a cache of its own, over the same encoder keys."""

    def __init__(self, depth, between=lambda: None):
        super().__init__()
        torch.manual_seed(0)
        self.self_attn, self.cross_attn, self.depth, self.between = Attention(), Attention(), depth, between

    def forward(self, x, memory, caches):
        for depth in range(self.depth):
            x = self.self_attn(x, append_to(caches.setdefault(depth, []), self.self_attn))
            self.between()
            x = self.cross_attn(x, lambda _: (*self.cross_attn.project_keys(memory), None))
        return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cut_at", [None, 6])
def test_cross_attention_of_a_layer_that_several_depths_share(mode, cut_at):
    """All depths have the same encoder keys; only the self-attention before tells which rows are whose."""
    model = SharedDecoder(3)
    x, other, memory = torch.randn(1, 8, WIDTH), torch.randn(1, 4, WIDTH), torch.randn(1, 5, WIDTH)
    with mode(), regard.watch(model) as recording:
        caches = {}
        for part in (x[:, :4], *x[:, 4:].split(1, 1)):
            model(part, memory, caches)
        if cut_at is not None:
            caches = {depth: [each[:, :, :cut_at] for each in keys] for depth, keys in caches.items()}
            model(other, memory, caches)
    for name, kv_len in (("self_attn", 8), ("cross_attn", 5)):
        log, calls = getattr(model, name).log, recording.calls(name)
        assert len(calls) == (3 if cut_at is None else 6)
        for depth in range(3):
            assert_rows(calls[depth], stack_rows(log[depth:15:3], kv_len))
            if cut_at is not None:
                entries = [*log[depth:9:3], log[15 + depth]]  # 4 + 1 + 1 rows, and the others
                assert_rows(calls[3 + depth], stack_rows(entries, kv_len if kv_len == 5 else 10))


def test_cross_attention_in_threads():
    """Each thread's self-attention decides where the rows of its cross-attention belong."""
    barrier = threading.Barrier(2)
    model = SharedDecoder(1, barrier.wait)
    x, memory = torch.randn(2, 1, 9, WIDTH), torch.randn(2, 1, 5, WIDTH)

    def run(thread):
        caches, first = {}, 3 + 2 * thread
        with torch.no_grad():
            for part in (x[thread, :, :first], *x[thread, :, first : first + 4].split(1, 1)):
                model(part, memory[thread], caches)

    with regard.watch(model) as recording:
        threads = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls = recording.calls("cross_attn")
    assert len(calls) == 2
    for call in calls:
        thread = int(call.shape[-2] == 9)
        own = model.cross_attn.project_keys(memory[thread])[0]
        log = [entry for entry in model.cross_attn.log if torch.equal(entry[1], own)]
        assert_rows(call, stack_rows(log, 5))


def test_earlier_prompts_are_told_apart_by_one_key(monkeypatch):
    """A window without a cache object is compared with all earlier ones, so that must not take long."""
    layer, counts = Layer(), []
    original = cache_store.have_same_bits

    def count(a, b):
        counts[-1] += 1
        return original(a, b)

    monkeypatch.setattr(cache_store, "have_same_bits", count)
    with torch.no_grad(), regard.watch(layer) as recording:
        for _ in range(12):
            counts.append(0)
            tokens, update = torch.randn(1, 12, WIDTH), append_to([], layer.attn, window=5)
            for part in (tokens[:, :4], *tokens[:, 4:].split(1, 1)):
                layer(part, update)
    assert len(recording.calls("attn")) == 12
    assert counts[-1] == counts[0]
