"""A helper that imported torch's function by name, as libraries of attention functions do."""

from torch.nn.functional import scaled_dot_product_attention


def attend(query, key, value):
    """Return causal attention."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)
