"""`regard profile`: what attention of one size costs on this machine, by each way there is, and why."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.cli.output import NUMBER, Out, styled
from regard.core.attention import attention
from regard.errors import ArgumentError
from regard.learn.cost import fit_exponent
from regard.masks import Mask, causal, document, padding, sliding_window
from regard.measures import Coarse, Distance, Entropy, Received
from regard.render.table import format_bytes, format_seconds

# Beyond this the ways that store weights or a mask are not tried: they hold a few of their size at once.
STORED_BYTES = 1 << 29
BARE, OURS = "F.scaled_dot_product_attention", "A @ value"


@dataclass(frozen=True)
class Size:
    """The attention that is asked about."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    mask: str
    dtype: str

    @property
    def entries(self) -> int:
        """The weights of all heads."""
        return self.batch * self.heads * self.q_len * self.kv_len


class Way(NamedTuple):
    """One way to the output: its name, which kernel it takes, and a call."""

    name: str
    kernel: str
    call: Callable[[], object]


def profile(out: Out, sizes: list[Size], rounds: int) -> int:
    """Measure and print, for each size."""
    for each in sizes:
        _check(each)
    try:
        import torch
    except ImportError as error:
        raise ImportError("profile: torch is not installed. pip install 'regard[torch]'") from error
    records = []
    machine = {"torch": torch.__version__, "device": "cpu", "threads": torch.get_num_threads()}
    for each in sizes:
        record = asdict(each) | _measured(out, each, rounds)
        records.append(record)
        _print(out, each, record, machine)
    growth = _growth(records)
    for name, exponent in growth.items():
        out.say(styled(f"{name} grows as ", (f"n^{exponent:.2f}", NUMBER)))
    out.record({"machine": machine, "rounds": rounds, "sizes": records, "grows_as": growth})
    return 0


def mask_of(size: Size) -> tuple[Mask | None, float]:
    """The mask that was asked for, as the library has it, and the share of the pairs that it lets through.

    >>> mask_of(Size(1, 8, 8, 4, 4, 64, 64, "window:2", "float32"))
    (causal() & sliding_window(2), 0.4375)
    """
    kind, _, count = size.mask.partition(":")
    square = size.q_len == size.kv_len
    align: Any = None if square else "lower_right"
    number = int(count) if count.isdecimal() else 0
    ends = np.arange(size.kv_len - size.q_len, size.kv_len) + 1  # the keys up to each query's own place
    mask: Mask | None
    if size.mask == "none":
        mask, seen = None, np.full_like(ends, size.kv_len)
    elif size.mask == "causal":
        mask, seen = causal(align), ends
    elif kind == "window" and 1 <= number <= size.kv_len:
        mask = causal(align) & (sliding_window(number) if square else sliding_window(number, align=align))
        seen = np.minimum(ends, number)
    elif kind == "padding" and 1 <= number < size.kv_len:
        mask, seen = padding(size.kv_len - number), np.full_like(ends, size.kv_len - number)
    elif kind == "documents" and square and 1 <= number <= size.kv_len:
        ids = np.arange(size.kv_len) * number // size.kv_len
        mask, seen = causal() & document(ids), ends - np.searchsorted(ids, ids)
    else:
        raise ArgumentError(
            "profile",
            received=f"--mask {size.mask} for {size.q_len:,} queries and {size.kv_len:,} keys",
            expected="none, causal, window:N, padding:N, or, with as many queries as keys, documents:N",
            hint="N counts tokens or documents, as in --mask window:256; there are no more than tokens.",
        )
    return mask, float(seen.mean()) / size.kv_len


def _check(size: Size) -> None:
    mask_of(size)  # refuses what is none
    if size.heads % size.kv_heads or size.q_len > size.kv_len:
        raise ArgumentError(
            "profile",
            received=f"{size.heads} heads with {size.kv_heads} of keys, {size.q_len:,} queries on {size.kv_len:,} keys",
            expected="heads divisible by those of keys, and no more queries than keys",
            hint="As in --heads 32 --kv-heads 8 --queries 1.",
        )


def _measured(out: Out, size: Size, rounds: int) -> dict[str, Any]:
    """Each way in turn, round after round: medians and the middle half of the times, and the most memory."""
    import torch

    ways, facts = _ways(torch, size)
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    memory: dict[str, int | None] = {}
    words = f"Timing {size.kv_len:,} tokens, {len(ways)} ways, {rounds} rounds"
    with out.busy(words, len(ways) * (rounds + 1)) as step, torch.no_grad():
        for way in ways:  # once to warm up, watched for its memory
            memory[way.name] = _peak(way.call)
            step()
        for _ in range(rounds):
            for way in ways:
                begin = time.perf_counter()
                way.call()
                times[way.name].append(time.perf_counter() - begin)
                step()
    rows = []
    for way in ways:
        spent = sorted(times[way.name])
        quarter = len(spent) // 4
        rows.append(
            {
                "way": way.name,
                "kernel": way.kernel,
                "median_seconds": statistics.median(spent),
                "middle_half_seconds": [spent[quarter], spent[-1 - quarter]],
                "peak_bytes": memory[way.name],
            }
        )
    return facts | {"ways": rows, "said": _said(size, facts, rows)}


def _ways(torch: Any, size: Size) -> tuple[list[Way], dict[str, Any]]:
    """The ways there are to the output of this size, and what is known of it before anything is timed."""
    from regard.engines.torch_kernels import find_sdpa_backend

    torch.manual_seed(0)
    number = getattr(torch, size.dtype)
    query = torch.randn(size.batch, size.heads, size.q_len, size.head_dim).to(number)
    key = torch.randn(size.batch, size.kv_heads, size.kv_len, size.head_dim).to(number)
    value = torch.randn(size.batch, size.kv_heads, size.kv_len, size.value_dim).to(number)
    (mask, seen), gqa = mask_of(size), size.kv_heads != size.heads
    A = attention(query, key, mask=mask, enable_gqa=gqa)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    flag = size.mask == "causal" and size.q_len == size.kv_len
    tensor = mask is not None and not flag
    fits = not tensor or size.q_len * size.kv_len <= STORED_BYTES
    dense = (
        torch.from_numpy(mask.to_dense(size.q_len, size.kv_len))
        if mask is not None and tensor and fits
        else None
    )
    options = {"attn_mask": dense, "is_causal": flag, "enable_gqa": gqa}
    bare = find_sdpa_backend(query, key, value, dense, 0.0, flag, None, gqa)
    how = (
        "is_causal=True"
        if flag
        else "no mask"
        if dense is None
        else f"attn_mask {size.q_len} × {size.kv_len}"
    )
    measures = Entropy(), Received(), Distance("lower_right"), Coarse(min(64, size.q_len, size.kv_len))
    plan = A.plan(*measures)
    A @ value  # then its kernel is known

    def measured() -> object:
        fresh = attention(query, key, mask=mask, enable_gqa=gqa)
        return fresh @ value, fresh.measure(*measures)

    def stored() -> object:
        groups = size.heads // size.kv_heads
        k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        scores = query @ k.mT * size.head_dim**-0.5
        hidden = dense
        if flag:
            hidden = torch.ones(size.q_len, size.kv_len, dtype=torch.bool).tril()
        if hidden is not None:
            scores = scores.masked_fill(~hidden, -torch.inf)
        return scores.softmax(-1) @ v

    ways = [
        Way(BARE, f"torch: {bare}, {how}", lambda: sdpa(query, key, value, **options)),
        Way(OURS, A.kernel, lambda: attention(query, key, mask=mask, enable_gqa=gqa) @ value),
        Way("A @ value and four measures", plan.replace("\n", "; "), measured),
    ]
    weights = size.entries * query.element_size()
    if not fits:
        del ways[0]
    if weights <= STORED_BYTES:
        ways.append(Way("softmax(scores) @ value", "one call for each step, weights stored", stored))
    return ways, {"matrix_bytes": weights, "seen": seen}


def _said(size: Size, facts: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What explains the numbers, and what could be done."""
    said, found = [], {row["way"]: row for row in rows}
    if BARE not in found:
        return [
            f"As a tensor the mask alone would take {format_bytes(size.q_len * size.kv_len)}; "
            "the bare call was not tried."
        ]
    bare, ours = found[BARE], found[OURS]
    if "math" in bare["kernel"]:
        why = "Its conditions are not met here"
        if size.value_dim != size.head_dim:
            why = f"The fused one wants value_dim {size.value_dim} to be head_dim {size.head_dim}"
        said.append(f"The bare call takes the math kernel, which stores all weights. {why}.")
    elif "attn_mask" in bare["kernel"] and facts["seen"] < 1:
        said.append(
            f"The mask lets {facts['seen']:.1%} of the pairs through. As a tensor it is read for every pair and "
            "saves nothing; as regard's mask, empty blocks are never computed."
        )
    ratio = ours["median_seconds"] / bare["median_seconds"]
    if ratio < 0.8:
        said.append(f"{OURS} takes {ratio:.2f} of the bare call's time.")
    if size.dtype in ("float16", "bfloat16"):
        said.append(
            f"{size.dtype} halves the memory; whether it is faster depends on the processor: try --dtype float32."
        )
    return said


def _peak(call: Callable[[], object]) -> int | None:
    """The most bytes a call held beyond those before it, by the kernel's own mark of the process; None elsewhere."""
    try:
        # What was freed is given back first, or it would be used again unseen.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)
    except (AttributeError, OSError):  # another C library, another system
        call()
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _growth(records: list[dict[str, Any]]) -> dict[str, float]:
    """The exponent of each way's time over the lengths, where there are several."""
    lengths = [record["kv_len"] for record in records]
    if len(set(lengths)) < 2:
        return {}
    names = [row["way"] for row in records[0]["ways"]]
    times = {
        name: [
            (record["kv_len"], row["median_seconds"])
            for record in records
            for row in record["ways"]
            if row["way"] == name
        ]
        for name in names
    }
    return {
        name: fit_exponent(*zip(*pairs, strict=True))
        for name, pairs in times.items()
        if len(dict(pairs)) > 1
    }


def _print(out: Out, size: Size, record: dict[str, Any], machine: dict[str, Any]) -> None:
    heads = f"{size.heads}" + (f" ({size.kv_heads} of keys)" if size.kv_heads != size.heads else "")
    shape = f"batch {size.batch}, heads {heads}, {size.q_len:,} × {size.kv_len:,}, head_dim {size.head_dim}"
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    rest = f", {size.dtype}, mask {size.mask}; torch {machine['torch']}, {threads}"
    out.say(styled((shape, "bold"), rest))
    out.say(
        f"If it were stored, the matrix would take {format_bytes(record['matrix_bytes'])}; "
        f"{record['seen']:.1%} of its pairs are seen."
    )
    out.say()
    first = record["ways"][0]["median_seconds"]
    rows, kernels = [], []
    for row in record["ways"]:
        low, high = row["middle_half_seconds"]
        rows.append(
            [
                row["way"],
                format_seconds(row["median_seconds"]),
                f"{format_seconds(low)} … {format_seconds(high)}",
                f"{row['median_seconds'] / first:.2f}×",
                "–" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]),
            ]
        )
        kernels.append([row["way"], row["kernel"]])
    names = ["median", "middle half", "of the first", "memory"]
    out.table(["", *names], rows, bold="median", right=names)
    out.say()
    out.table(["", "kernel"], kernels)
    for line in record["said"]:
        out.say()
        out.say(line)
    out.say()
