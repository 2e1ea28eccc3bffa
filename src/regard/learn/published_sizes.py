"""Published sizes of models, and the attention weights and multiply-adds that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regard.render.table import format_bytes, format_table


@dataclass(frozen=True)
class PublishedModel:
    """The published size of a model's attention.

    Args:
        layers: Number of layers.
        heads: Number of heads per layer.
        length: Number of tokens.
        d_k: Number of entries in each query, key and value of a head.
        source: The publication.

    >>> published_models["GPT-3"].entries
    38654705664
    >>> published_models["GPT-3"].source
    'Brown et al. 2020, arXiv:2005.14165'
    """

    layers: int
    heads: int
    length: int
    d_k: int
    source: str = ""

    @property
    def entries(self) -> int:
        """Number of attention weights of all layers and heads for one sequence."""
        return self.layers * self.heads * self.length**2

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all scores and outputs: d_k for each score, and d_k to apply its weight to a value."""
        return 2 * self.d_k * self.entries


# Sizes of well-known models by name, each with its source.
published_models = {
    "GPT-3": PublishedModel(96, 96, 2048, 128, "Brown et al. 2020, arXiv:2005.14165"),
    "LLaMA-2-70B": PublishedModel(
        80, 64, 4096, 128, "Touvron et al. 2023, arXiv:2307.09288, and its configuration"
    ),
    "ViT-Large": PublishedModel(24, 16, 197, 64, "Dosovitskiy et al. 2020, arXiv:2010.11929"),
    "AlphaFold2": PublishedModel(
        48, 8, 500, 32, "Jumper et al. 2021, doi:10.1038/s41586-021-03819-2; for 500 residues"
    ),
}


@dataclass(frozen=True)
class ModelTable:
    """The attention weights of several models; `itemsize` is the bytes per weight; prints as a table.

    >>> model_table().models["GPT-3"].heads, model_table().itemsize
    (96, 4)
    """

    models: dict[str, PublishedModel]
    itemsize: int

    def __str__(self) -> str:
        table = [
            [
                name,
                *(f"{x:,}" for x in (m.layers, m.heads, m.d_k, m.length, m.entries)),
                f"{m.multiply_adds:.2e}" if m.multiply_adds >= 1e6 else f"{m.multiply_adds}",
                format_bytes(m.entries * self.itemsize),
            ]
            for name, m in self.models.items()
        ]
        names = ["model", "layers", "heads", "d_k", "length", "weights", "multiply-adds", "memory"]
        return format_table(table, names)


def model_table(
    models: dict[str, PublishedModel] = published_models, *, dtype: npt.DTypeLike = np.float32
) -> ModelTable:
    """Tabulate the attention weights of each model for one sequence, the multiply-adds, and their size if stored.

    Args:
        models: Models by name.
        dtype: The NumPy dtype whose size the bytes are computed with.

    Returns:
        The table; `print` it to read it.

    >>> print(model_table({"this book": PublishedModel(1, 1, 5, 4), **published_models}))
          model  layers  heads  d_k  length         weights  multiply-adds   memory
      this book       1      1    4       5              25            200    100 B
          GPT-3      96     96  128   2,048  38,654,705,664       9.90e+12   155 GB
    LLaMA-2-70B      80     64  128   4,096  85,899,345,920       2.20e+13   344 GB
      ViT-Large      24     16   64     197      14,902,656       1.91e+09  59.6 MB
     AlphaFold2      48      8   32     500      96,000,000       6.14e+09   384 MB
    """
    return ModelTable(dict(models), np.dtype(dtype).itemsize)
