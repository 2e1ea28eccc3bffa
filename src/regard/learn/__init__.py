"""The teaching wing: attention to be read, on NumPy alone. Masks are boolean arrays, True = attend."""

from regard.learn import examples, exercises
from regard.learn.attention import ScaledDotProductAttention, scaled_dot_product_attention
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
from regard.learn.loops import CountedAttention, Counts, attention_by_loops
from regard.learn.masks import create_causal_mask, create_padding_mask

__all__ = [
    "Comparison",
    "CountedAttention",
    "Counts",
    "Example",
    "MultiHeadAttention",
    "Projection",
    "ScaledDotProductAttention",
    "attention_by_loops",
    "cat",
    "create_causal_mask",
    "create_padding_mask",
    "examples",
    "exercises",
    "magnitude",
    "projection",
    "pronoun",
    "scaled_dot_product_attention",
    "three_tokens",
    "tiny_head",
]
