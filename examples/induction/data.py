"""What the models are trained on: random sequences in which a block comes twice, and English that ships with Python."""

from __future__ import annotations

import ast
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class Repeats(NamedTuple):
    """Sequences with a repeat, and where it is: all (batch, length).

    `first` and `second` are True on the two copies. `source` is, for each token that the second copy goes on after, the
    position of the token that came next the first time, which is where an induction head looks; elsewhere −1.
    """

    tokens: Tensor
    first: Tensor
    second: Tensor
    source: Tensor


def repeats(
    batch: int,
    seed: int | torch.Generator,
    *,
    length: int = 64,
    vocabulary: int = 128,
    block: tuple[int, int] = (12, 32),
) -> Repeats:
    """Random tokens, a random block of them, random tokens, the same block again, random tokens to the end.

    How long the block is (`block`: from, to) and where its copies stand differ from sequence to sequence, so that no
    fixed distance and no position gives the repeat away.
    """
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed

    def up_to(most: Tensor) -> Tensor:
        """A random whole number from 0 to `most`, for each sequence: (batch, 1)."""
        return (torch.rand(batch, 1, generator=generator) * (most + 1)).long()

    size = block[0] + up_to(torch.tensor(block[1] - block[0]))
    start = up_to(length - 2 * size)
    again = start + size + up_to(length - start - 2 * size)
    at = torch.arange(length)
    first, second = ((at >= begin) & (at < begin + size) for begin in (start, again))
    source = torch.where(second, at - again + start, at)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator).gather(1, source)
    follows = second & second.roll(-1, 1) & (at < length - 1)
    return Repeats(tokens, first, second, torch.where(follows, source + 1, -1))


def encode(text: str) -> Tensor:
    """The bytes of a text as a batch of one: (1, n)."""
    return torch.tensor([list(text.encode())])


def decode(tokens: Tensor) -> str:
    """The text of some bytes, (n,) or (1, n); what is not UTF-8 shows as �."""
    return bytes(tokens.flatten().tolist()).decode(errors="replace")


class Text(NamedTuple):
    """Bytes to learn from, and bytes of other documents to be judged by; no paragraph is in both, or twice in one."""

    train: bytes
    held_out: bytes


def text() -> Text:
    """English that ships with Python: the topics of `help()`, and the docstrings of the standard library.

    Both are part of Python, © Python Software Foundation, under the PSF License Version 2. About every twentieth
    document (a topic, or the docstrings of a module) is held out, chosen by its name.
    """
    documents = _topics() | _docstrings()
    held = {name for name in documents if zlib.crc32(name.encode()) % 20 == 0}
    seen: set[str] = set()
    parts = []
    for names in (sorted(documents.keys() - held), sorted(held)):
        paragraphs = []
        for name in names:
            for paragraph in documents[name].split("\n\n"):
                if paragraph.strip() not in seen:
                    seen.add(paragraph.strip())
                    paragraphs.append(paragraph.rstrip())
        parts.append("\n\n".join(paragraphs).encode())
    return Text(*parts)


def _topics() -> dict[str, str]:
    """The pages that `help("…")` shows, by name."""
    from pydoc_data.topics import topics

    return {f"help {name}": page for name, page in topics.items()}


def _docstrings() -> dict[str, str]:
    """The docstrings of each module of the standard library, by its path; not those of a line, nor of tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data"}
    found = {}
    for path in sorted(root.rglob("*.py")):
        if left_out & set(path.relative_to(root).parts):
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
        texts = [ast.get_docstring(node) or "" for node in nodes]
        found[path.relative_to(root).as_posix()] = "\n\n".join(t for t in texts if len(t) > 120)
    return {name: page for name, page in found.items() if page}
