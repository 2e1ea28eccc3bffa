"""A helper that imported attention functions by name, as libraries of attention functions do."""

from torch.nn.functional import scaled_dot_product_attention

from regard import attention


def attend(query, key, value):
    """Return causal attention."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def attend_with_regard(query, key, **options):
    """Return the matrix of `regard.attention`."""
    return attention(query, key, **options)
