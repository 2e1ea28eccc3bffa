"""Attention written to be read, on NumPy alone, for the book and its exercises. Masks are boolean, True = attend.

Start with `ScaledDotProductAttention`, the four steps as a class, and the example `cat`. `family` has fifteen variants,
`exercises` the tasks with a checker, `figures` the drawings of the book. Imports from `regard.core` and below;
`exercises` also imports `regard.testing`.
"""

from regard.learn import examples, exercises, family, figures
from regard.learn.additive import AdditiveAttention, AdditiveCounts, CountedScores
from regard.learn.attention import ScaledDotProductAttention, scaled_dot_product_attention
from regard.learn.batches import pad_batch
from regard.learn.block import FeedForward, LayerNorm, TransformerBlock, dropout, gelu, relu
from regard.learn.cost import (
    Cost,
    CostTable,
    FourStepTable,
    Profile,
    ProfileRow,
    StepCost,
    cost_table,
    fit_exponent,
    profile,
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
from regard.learn.heads import MultiHeadAttention
from regard.learn.kernel import exponential_kernel, gaussian_kernel, kernel_attention
from regard.learn.loops import CountedAttention, OperationCounts, attention_by_loops
from regard.learn.masks import create_causal_mask, create_padding_mask
from regard.learn.multiply_adds import Multiplication, iter_multiplications
from regard.learn.published_sizes import ModelTable, PublishedModel, model_table, published_models
from regard.learn.recurrent import RecurrentNetwork
from regard.learn.softmax_alternatives import (
    AlternativeRow,
    AlternativeTable,
    compare_softmax_alternatives,
    divide_by_maximum,
    divide_by_sum,
    hardmax,
    normalised_relu,
    normalised_sigmoid,
    softmax,
    softmax_jacobian,
    sparsemax,
)
from regard.learn.tiny_gpt import TinyGPT, TinyGPTRun
from regard.learn.variance import (
    Sharpness,
    VarianceExperiment,
    VarianceRow,
    sharpness,
    unit_vectors,
    variance_experiment,
)

__all__ = [
    "AdditiveAttention",
    "AdditiveCounts",
    "AlternativeRow",
    "AlternativeTable",
    "Cost",
    "CostTable",
    "CountedAttention",
    "CountedScores",
    "Example",
    "FeedForward",
    "FourStepTable",
    "LayerNorm",
    "ModelTable",
    "MultiHeadAttention",
    "Multiplication",
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
