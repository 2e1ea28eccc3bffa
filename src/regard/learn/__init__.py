"""Attention written to be read, on NumPy alone, for the book and its exercises. Masks are boolean, True = attend.

Start with `ScaledDotProductAttention`, the four steps as a class, and the example `cat`. `CheckedAttention` is the
class around it that checks its arguments, reads masks and explains a row. `family` has fifteen variants,
`exercises` the tasks with a checker, `figures` the drawings of the book. `gpt` is the model of `TinyGPT` in PyTorch and
is imported by itself. Imports from `regard.core` and below; `exercises` also imports `regard.testing`, `gpt` imports
`regard.nn`.

Design notes:
- Figures of the book are SVG made by `regard.learn.figures`, in a cell of the chapter. A notebook shows them as the
  site does; inline SVG takes over the page's colours, which an image file cannot.
- A submission runs in a process with limits, and checks itself there. Answers may be functions, which cannot be sent
  to another process. Limits stop accidents; nothing here is a sandbox, and the docs say so.
- Progress is a file in the working folder. It can be seen, copied and deleted with the answers; nothing is written to
  the home directory.
"""

from regard.learn import examples, exercises, family, figures
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.block import (
    FeedForward,
    LayerNorm,
    NumpyMultiHeadAttention,
    TransformerBlock,
    dropout,
    gelu,
    relu,
)
from regard.learn.checked import CheckedAttention, scaled_dot_product_attention
from regard.learn.cost import (
    Cost,
    CostTable,
    CountedAttention,
    FourStepTable,
    ModelTable,
    Multiplication,
    OperationCounts,
    Profile,
    ProfileRow,
    PublishedModel,
    StepCost,
    attention_by_loops,
    cost_table,
    fit_exponent,
    iter_multiplications,
    model_table,
    profile,
    published_models,
)
from regard.learn.examples import (
    Example,
    ProjectionExample,
    ScoreExample,
    cat,
    magnitude,
    projection,
    pronoun,
    three_by_three,
    three_tokens,
    tiny_head,
)
from regard.learn.masks import create_causal_mask, create_padding_mask, pad_batch
from regard.learn.predecessors import (
    AdditiveAttention,
    AdditiveCounts,
    CountedScores,
    RecurrentNetwork,
    exponential_kernel,
    gaussian_kernel,
    kernel_attention,
)
from regard.learn.softmax_alternatives import (
    AlternativeRow,
    AlternativeTable,
    Sharpness,
    VarianceExperiment,
    VarianceRow,
    compare_softmax_alternatives,
    divide_by_maximum,
    divide_by_sum,
    hardmax,
    normalised_relu,
    normalised_sigmoid,
    sharpness,
    softmax,
    softmax_jacobian,
    sparsemax,
    unit_vectors,
    variance_experiment,
)
from regard.learn.tiny_gpt import TinyGPT, TinyGPTRun

__all__ = [
    "AdditiveAttention",
    "AdditiveCounts",
    "AlternativeRow",
    "AlternativeTable",
    "CheckedAttention",
    "Cost",
    "CostTable",
    "CountedAttention",
    "CountedScores",
    "Example",
    "FeedForward",
    "FourStepTable",
    "LayerNorm",
    "ModelTable",
    "Multiplication",
    "NumpyMultiHeadAttention",
    "OperationCounts",
    "Profile",
    "ProfileRow",
    "ProjectionExample",
    "PublishedModel",
    "RecurrentNetwork",
    "ScaledDotProductAttention",
    "ScoreExample",
    "Sharpness",
    "StepCost",
    "TinyGPT",
    "TinyGPTRun",
    "TransformerBlock",
    "VarianceExperiment",
    "VarianceRow",
    "attention_by_loops",
    "cat",
    "compare_softmax_alternatives",
    "cost_table",
    "create_causal_mask",
    "create_padding_mask",
    "divide_by_maximum",
    "divide_by_sum",
    "dropout",
    "examples",
    "exercises",
    "exponential_kernel",
    "family",
    "figures",
    "fit_exponent",
    "gaussian_kernel",
    "gelu",
    "hardmax",
    "iter_multiplications",
    "kernel_attention",
    "magnitude",
    "model_table",
    "normalised_relu",
    "normalised_sigmoid",
    "pad_batch",
    "profile",
    "projection",
    "pronoun",
    "published_models",
    "relu",
    "scaled_dot_product_attention",
    "sharpness",
    "softmax",
    "softmax_jacobian",
    "sparsemax",
    "three_by_three",
    "three_tokens",
    "tiny_head",
    "unit_vectors",
    "variance_experiment",
]
