"""A helper that imported `flex_attention` by name, as model files do."""

from torch.nn.attention.flex_attention import flex_attention


def attend(query, key, value, **options):
    """Return attention by the imported function."""
    return flex_attention(query, key, value, **options)
