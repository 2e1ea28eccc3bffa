"""The teaching wing: attention to be read, on NumPy alone. Masks are boolean arrays, True = attend."""

from regard.learn import examples, exercises
from regard.learn.additive import AdditiveAttention, AdditiveCounts, CountedScores
from regard.learn.attention import ScaledDotProductAttention, scaled_dot_product_attention
from regard.learn.batches import pad_batch
from regard.learn.block import FeedForward, LayerNorm, TransformerBlock, dropout, gelu, relu
from regard.learn.cost import (
    Cost,
    CostTable,
    ModelTable,
    Profile,
    ProfileRow,
    PublishedModel,
    cost_table,
    fitted_exponent,
    model_table,
    profile,
    published_models,
)
from regard.learn.examples import (
    Comparison,
    Example,
    Projection,
    cat,
    magnitude,
    projection,
    pronoun,
    three_tokens,
    tiny_head,
)
from regard.learn.heads import MultiHeadAttention
from regard.learn.kernel import exponential_kernel, gaussian_kernel, kernel_attention
from regard.learn.loops import CountedAttention, Counts, attention_by_loops
from regard.learn.masks import create_causal_mask, create_padding_mask
from regard.learn.recurrent import Recurrence
from regard.learn.rivals import (
    RivalTable,
    Shares,
    compare_rivals,
    divide_by_maximum,
    divide_by_sum,
    hardmax,
    normalised_relu,
    normalised_sigmoid,
    softmax,
    softmax_jacobian,
    sparsemax,
)
from regard.learn.variance import (
    Sharpness,
    VarianceExperiment,
    VarianceRow,
    sharpness,
    unit_vectors,
    variance_experiment,
)
from regard.learn.walk import Multiplication, multiplications

__all__ = [
    "AdditiveAttention",
    "AdditiveCounts",
    "Comparison",
    "Cost",
    "CostTable",
    "CountedAttention",
    "CountedScores",
    "Counts",
    "Example",
    "FeedForward",
    "LayerNorm",
    "ModelTable",
    "MultiHeadAttention",
    "Multiplication",
    "Profile",
    "ProfileRow",
    "Projection",
    "PublishedModel",
    "Recurrence",
    "RivalTable",
    "ScaledDotProductAttention",
    "Shares",
    "Sharpness",
    "TransformerBlock",
    "VarianceExperiment",
    "VarianceRow",
    "attention_by_loops",
    "cat",
    "compare_rivals",
    "cost_table",
    "create_causal_mask",
    "create_padding_mask",
    "divide_by_maximum",
    "divide_by_sum",
    "dropout",
    "examples",
    "exercises",
    "exponential_kernel",
    "fitted_exponent",
    "gaussian_kernel",
    "gelu",
    "hardmax",
    "kernel_attention",
    "magnitude",
    "model_table",
    "multiplications",
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
    "three_tokens",
    "tiny_head",
    "unit_vectors",
    "variance_experiment",
]
