"""`regard profile` and `selfcheck`: time attention on this machine, and check the installed versions."""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import typer

from regard.cli.options import JsonOption
from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.core.attention import attention
from regard.errors import ArgumentError
from regard.learn.cost import fit_exponent
from regard.masks import Mask, causal, document, padding, sliding_window
from regard.measures import Coarse, Distance, Entropy, Received
from regard.render.table import format_bytes, format_seconds

if TYPE_CHECKING:
    from regard.testing.installation import InstallationReport

# Variants that store more weights, or a larger mask, than this are skipped: they hold several copies at once.
MAX_STORED_BYTES = 1 << 29
SDPA, LAZY = "F.scaled_dot_product_attention", "A @ value"


@dataclass(frozen=True)
class ProfileSize:
    """The sizes, mask and dtype to profile."""

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
    def num_weights(self) -> int:
        """Number of attention weights of all heads."""
        return self.batch * self.heads * self.q_len * self.kv_len


class TimedVariant(NamedTuple):
    """One way to compute the output: its name, its kernel, and a function that runs it."""

    name: str
    kernel: str
    call: Callable[[], object]


def profile(
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length", "-n", metavar="N", min=1, help="Number of tokens. Default: 2048. Repeatable."
        ),
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option(
            "--queries",
            metavar="N",
            min=1,
            help="Number of queries, e.g. 1 for decoding. Default: one per token.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option("--heads", metavar="N", min=1, help="Number of heads.")] = 8,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            "--kv-heads", metavar="N", min=1, help="Number of key/value heads. Default: as many as heads."
        ),
    ] = None,
    head_dim: Annotated[
        int, typer.Option("--head-dim", metavar="N", min=1, help="Width of a query or key.")
    ] = 64,
    value_dim: Annotated[
        int | None,
        typer.Option(
            "--value-dim", metavar="N", min=1, help="Width of a value. Default: the same as --head-dim."
        ),
    ] = None,
    mask: Annotated[
        str,
        typer.Option(
            "--mask",
            metavar="MASK",
            help="none; causal; window:N, the last N keys; padding:N, N padded keys; documents:N, N packed documents.",
        ),
    ] = "causal",
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"],
        typer.Option("--dtype", help="Dtype to compute with."),
    ] = "float32",
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, help="Number of times that each variant is timed.")
    ] = 7,
    as_json: JsonOption = False,
) -> int:
    """Time attention of a given size on this machine, and show the kernel and peak memory of each variant.

    The variants: PyTorch's kernel, regard's product, the product with four measures, and stored weights.
    """
    printer = Printer(as_json)
    sizes = [
        ProfileSize(
            batch,
            heads,
            kv_heads or heads,
            queries or n,
            n,
            head_dim,
            value_dim or head_dim,
            mask,
            dtype,
        )
        for n in length or [2048]
    ]
    for size in sizes:
        _check_size(size)
    try:
        import torch
    except ImportError as error:
        raise ImportError("profile: torch is not installed. pip install 'regard[torch]'") from error
    records = []
    machine = {"torch": torch.__version__, "device": "cpu", "threads": torch.get_num_threads()}
    for size in sizes:
        record = asdict(size) | _time_variants(printer, size, rounds)
        records.append(record)
        _print_size(printer, size, record, machine)
    exponents = _fit_exponents(records)
    for name, exponent in exponents.items():
        printer.print(style_text(f"{name} grows as ", (f"n^{exponent:.2f}", NUMBER_STYLE)))
    printer.record({"machine": machine, "rounds": rounds, "sizes": records, "growth_exponents": exponents})
    return 0


def parse_mask(size: ProfileSize) -> tuple[Mask | None, float]:
    """Return the mask of a size, and the share of the pairs that it leaves visible.

    >>> parse_mask(ProfileSize(1, 8, 8, 4, 4, 64, 64, "window:2", "float32"))
    (causal() & sliding_window(2), 0.4375)
    """
    kind, _, count = size.mask.partition(":")
    square = size.q_len == size.kv_len
    align: Any = None if square else "lower_right"
    number = int(count) if count.isdecimal() else 0
    ends = np.arange(size.kv_len - size.q_len, size.kv_len) + 1  # the keys up to each query's own position
    mask: Mask | None
    if size.mask == "none":
        mask, visible = None, np.full_like(ends, size.kv_len)
    elif size.mask == "causal":
        mask, visible = causal(align), ends
    elif kind == "window" and 1 <= number <= size.kv_len:
        mask = causal(align) & (sliding_window(number) if square else sliding_window(number, align=align))
        visible = np.minimum(ends, number)
    elif kind == "padding" and 1 <= number < size.kv_len:
        mask, visible = padding(size.kv_len - number), np.full_like(ends, size.kv_len - number)
    elif kind == "documents" and square and 1 <= number <= size.kv_len:
        ids = np.arange(size.kv_len) * number // size.kv_len
        mask, visible = causal() & document(ids), ends - np.searchsorted(ids, ids)
    else:
        raise ArgumentError(
            "profile",
            received=f"--mask {size.mask} for {size.q_len:,} queries and {size.kv_len:,} keys",
            expected="none, causal, window:N, padding:N, or, with as many queries as keys, documents:N",
            hint="N is a number of tokens or documents, at most the number of keys, e.g. --mask window:256.",
        )
    return mask, float(visible.mean()) / size.kv_len


def _check_size(size: ProfileSize) -> None:
    parse_mask(size)
    if size.heads % size.kv_heads or size.q_len > size.kv_len:
        raise ArgumentError(
            "profile",
            received=f"{size.heads} heads with {size.kv_heads} key/value heads, "
            f"{size.q_len:,} queries on {size.kv_len:,} keys",
            expected="heads divisible by the key/value heads, and no more queries than keys",
            hint="Example: --heads 32 --kv-heads 8 --queries 1.",
        )


def _time_variants(printer: Printer, size: ProfileSize, rounds: int) -> dict[str, Any]:
    """Time the variants in turn, round after round, and measure their peak memory."""
    import torch

    variants, facts = _build_variants(torch, size)
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    memory: dict[str, int | None] = {}
    description = f"Timing {size.kv_len:,} tokens, {len(variants)} variants, {rounds} rounds"
    with printer.progress(description, len(variants) * (rounds + 1)) as advance, torch.no_grad():
        for variant in variants:  # the warm-up call measures the memory
            memory[variant.name] = _measure_peak(variant.call)
            advance()
        for _ in range(rounds):
            for variant in variants:
                start = time.perf_counter()
                variant.call()
                times[variant.name].append(time.perf_counter() - start)
                advance()
    rows = []
    for variant in variants:
        ordered = sorted(times[variant.name])
        quarter = len(ordered) // 4
        rows.append(
            {
                "name": variant.name,
                "kernel": variant.kernel,
                "median_seconds": statistics.median(ordered),
                "quartile_seconds": [ordered[quarter], ordered[-1 - quarter]],
                "peak_bytes": memory[variant.name],
            }
        )
    return facts | {"variants": rows, "notes": _explain_times(size, facts, rows)}


def _build_variants(torch: Any, size: ProfileSize) -> tuple[list[TimedVariant], dict[str, Any]]:
    """Build the variants for a size, and the facts that are known before anything is timed."""
    from regard.engines.torch_kernels import find_sdpa_backend

    torch.manual_seed(0)
    dtype = getattr(torch, size.dtype)
    query = torch.randn(size.batch, size.heads, size.q_len, size.head_dim).to(dtype)
    key = torch.randn(size.batch, size.kv_heads, size.kv_len, size.head_dim).to(dtype)
    value = torch.randn(size.batch, size.kv_heads, size.kv_len, size.value_dim).to(dtype)
    (mask, visible), gqa = parse_mask(size), size.kv_heads != size.heads
    A = attention(query, key, mask=mask, enable_gqa=gqa)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    is_causal = size.mask == "causal" and size.q_len == size.kv_len
    needs_tensor = mask is not None and not is_causal
    fits = not needs_tensor or size.q_len * size.kv_len <= MAX_STORED_BYTES
    mask_tensor = None
    if mask is not None and needs_tensor and fits:
        mask_tensor = torch.from_numpy(mask.to_dense(size.q_len, size.kv_len))
    options = {"attn_mask": mask_tensor, "is_causal": is_causal, "enable_gqa": gqa}
    sdpa_kernel = find_sdpa_backend(query, key, value, mask_tensor, 0.0, is_causal, None, gqa)
    argument = "no mask"
    if is_causal:
        argument = "is_causal=True"
    elif mask_tensor is not None:
        argument = f"attn_mask {size.q_len} × {size.kv_len}"
    measures = (
        Entropy(),
        Received(),
        Distance("lower_right"),
        Coarse(min(64, size.q_len, size.kv_len), "mean"),
    )
    plan = A.plan(*measures)
    A @ value  # A.kernel is known after the product

    def run_measured() -> object:
        fresh = attention(query, key, mask=mask, enable_gqa=gqa)
        return fresh @ value, fresh.measure(*measures)

    def run_stored() -> object:
        groups = size.heads // size.kv_heads
        k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        scores = query @ k.mT * size.head_dim**-0.5
        visible = mask_tensor
        if is_causal:
            visible = torch.ones(size.q_len, size.kv_len, dtype=torch.bool).tril()
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        return scores.softmax(-1) @ v

    variants = [
        TimedVariant(SDPA, f"torch: {sdpa_kernel}, {argument}", lambda: sdpa(query, key, value, **options)),
        TimedVariant(LAZY, A.kernel, lambda: attention(query, key, mask=mask, enable_gqa=gqa) @ value),
        TimedVariant("A @ value and four measures", plan.replace("\n", "; "), run_measured),
    ]
    weight_bytes = size.num_weights * query.element_size()
    if not fits:
        del variants[0]
    if weight_bytes <= MAX_STORED_BYTES:
        kernel = "one call for each step, weights stored"
        variants.append(TimedVariant("softmax(scores) @ value", kernel, run_stored))
    return variants, {"matrix_bytes": weight_bytes, "visible_share": visible}


def _explain_times(size: ProfileSize, facts: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return notes that explain the times, and what to try."""
    notes, by_name = [], {row["name"]: row for row in rows}
    if SDPA not in by_name:
        mask_bytes = format_bytes(size.q_len * size.kv_len)
        return [f"{SDPA} was skipped: its mask tensor alone would take {mask_bytes}."]
    sdpa, lazy = by_name[SDPA], by_name[LAZY]
    if "math" in sdpa["kernel"]:
        reason = "The conditions of the fused kernel are not met here"
        if size.value_dim != size.head_dim:
            reason = f"The fused kernel requires value_dim {size.value_dim} to equal head_dim {size.head_dim}"
        notes.append(f"{SDPA} uses the math kernel, which stores all weights. {reason}.")
    elif "attn_mask" in sdpa["kernel"] and facts["visible_share"] < 1:
        notes.append(
            f"The mask leaves {facts['visible_share']:.1%} of the pairs visible. As a tensor it is read for every pair "
            "and saves no time; with regard's mask, empty blocks are skipped."
        )
    ratio = lazy["median_seconds"] / sdpa["median_seconds"]
    if ratio < 0.8:
        notes.append(f"{LAZY} takes {ratio:.2f} of the time of {SDPA}.")
    if size.dtype in ("float16", "bfloat16"):
        notes.append(
            f"{size.dtype} halves the memory. Whether it is faster depends on the processor: try --dtype float32."
        )
    return notes


def _measure_peak(call: Callable[[], object]) -> int | None:
    """Return the peak memory of a call beyond what the process held before; None if the system does not report it."""
    try:
        # Freed memory is returned to the system first; otherwise its reuse would not be counted.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _read_status("VmRSS")
        call()
        return max(0, _read_status("VmHWM") - before)
    except (AttributeError, OSError, TypeError):  # not Linux with glibc
        call()
        return None


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _fit_exponents(records: list[dict[str, Any]]) -> dict[str, float]:
    """Fit the exponent of each variant's time over the lengths, if there are several."""
    if len({record["kv_len"] for record in records}) < 2:
        return {}
    times: dict[str, list[tuple[int, float]]] = {row["name"]: [] for row in records[0]["variants"]}
    for record in records:
        for row in record["variants"]:
            if row["name"] in times:
                times[row["name"]].append((record["kv_len"], row["median_seconds"]))
    return {
        name: fit_exponent(*zip(*pairs, strict=True)) for name, pairs in times.items() if len(dict(pairs)) > 1
    }


def _print_size(printer: Printer, size: ProfileSize, record: dict[str, Any], machine: dict[str, Any]) -> None:
    heads = f"{size.heads}" + (f" ({size.kv_heads} key/value)" if size.kv_heads != size.heads else "")
    shape = f"batch {size.batch}, heads {heads}, {size.q_len:,} × {size.kv_len:,}, head_dim {size.head_dim}"
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    rest = f", {size.dtype}, mask {size.mask}; torch {machine['torch']}, {threads}"
    printer.print(style_text((shape, "bold"), rest))
    printer.print(
        f"The whole matrix would take {format_bytes(record['matrix_bytes'])}; "
        f"{record['visible_share']:.1%} of its pairs are visible."
    )
    printer.print()
    first = record["variants"][0]["median_seconds"]
    rows, kernels = [], []
    for row in record["variants"]:
        low, high = row["quartile_seconds"]
        rows.append(
            [
                row["name"],
                format_seconds(row["median_seconds"]),
                f"{format_seconds(low)} … {format_seconds(high)}",
                f"{row['median_seconds'] / first:.2f}×",
                "–" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]),
            ]
        )
        kernels.append([row["name"], row["kernel"]])
    names = ["median", "quartiles", "ratio", "peak memory"]
    printer.table(["", *names], rows, bold="median", right=names)
    printer.print()
    printer.table(["", "kernel"], kernels)
    for note in record["notes"]:
        printer.print()
        printer.print(note)
    printer.print()


def selfcheck(
    cases: Annotated[
        int, typer.Option("--cases", "-n", metavar="N", min=1, help="Number of generated cases.")
    ] = 100,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Also check this device, e.g. cuda or mps; takes about two minutes.",
        ),
    ] = None,
    report_file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write the report to a JSON file to post. Without --device, it checks the GPU that torch finds.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check that regard computes the right numbers with the installed versions, on generated cases.

    The exit code is 1 if something is wrong. The report has versions and settings, but no paths or names: post the file
    that --report writes in an issue.
    """
    from regard.testing.device_check import find_device
    from regard.testing.installation import check_installation

    printer = Printer(as_json)
    if report_file is not None:
        report_file.open("a").close()  # an error comes before the check, not after it
        device = device or find_device()
    report = check_installation(cases, device=device)
    if report_file is not None:
        report_file.write_text(json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n", "utf-8")
    _print_report(printer, report)
    if report_file is not None:
        printer.print(f"Wrote {report_file}. Post it with the issue form 'A check of your machine'.")
    printer.record(report.to_dict())
    return 0 if report.ok else 1


def _print_report(printer: Printer, report: InstallationReport) -> None:
    rows = [["python", report.platform["python"]]]
    rows += [[name, version or "not installed"] for name, version in report.versions.items()]
    rows += [["platform", " ".join(report.platform[name] for name in ("system", "machine", "libc"))]]
    rows += [["compiled pass", report.platform["compiled_pass"]]]
    rows += [[name.replace("_", " "), str(value)] for name, value in report.precision.items()]
    printer.table(["", "installed"], rows)
    printer.print()
    if report.kernels:
        checks = [
            [kernel["name"], kernel["device"], kernel["cause"] or "passed"] for kernel in report.kernels
        ]
        printer.table(["kernel", "device", "check"], checks)
        printer.print()
    cases = report.cases
    printer.print(
        style_text(
            f"{cases['count']} cases on {', '.join(cases['engines'])}: {cases['failed']} of {cases['checks']} checks "
            "failed; the largest error is ",
            (f"{cases['largest_share_of_allowed_error']:.2f}", NUMBER_STYLE),
            f" of the allowed error ({cases['seconds']:.1f} s).",
        )
    )
    for failure in cases["failures"]:
        printer.print(f"  {failure}")
    if report.device:
        _print_device(printer, report.device)
    for problem in report.problems:
        printer.print(f"problem: {problem}", "bold red")
    printer.print(
        "ok" if report.ok else "Report it: paste the output of 'regard selfcheck --json' into an issue."
    )


def _print_device(printer: Printer, found: dict[str, Any]) -> None:
    printer.print()
    printer.table(["device", ""], [[name, str(value)] for name, value in found["device"].items()])
    printer.print()
    kernels = [*found["kernels"], *found["compiled_kernels"]]
    if kernels:
        rows = [[kernel["name"], kernel["cause"] or "passed"] for kernel in kernels]
        printer.table(["kernel of the device", "check"], rows)
        printer.print()
    hidden = ("operator", "problems")
    rows = [
        [
            entry["operator"],
            ", ".join(f"{name} {value}" for name, value in entry.items() if name not in hidden),
        ]
        for entry in found["conventions"]
    ]
    if rows:
        printer.table(["operator", "conventions"], rows)
        printer.print()
    runs = [
        [run["engine"], run["setting"], f"{run['count']}", f"{run['failed']}", f"{run['largest_share']:.2f}"]
        for run in found["cases"]
    ]
    printer.table(["engine", "setting", "cases", "failed", "largest share of the allowed error"], runs)
    for failure in (failure for run in found["cases"] for failure in run["failures"]):
        printer.print(f"  {failure}")
    if found["speed"]:
        printer.print()
        speed = [
            [f"{entry['length']:,}", entry.get("what", ""), *_format_ratio(entry)] for entry in found["speed"]
        ]
        printer.table(["tokens", "", "bare, ms", "regard, ms", "ratio", "estimated for an A100"], speed)
    printer.print(f"checked in {found['seconds']:.0f} s")


def _format_ratio(entry: dict[str, Any]) -> list[str]:
    if "error" in entry:
        return [entry["error"], "", "", ""]
    return [str(entry[name]) for name in ("bare_ms", "regard_ms", "ratio", "estimated_ratio")]
