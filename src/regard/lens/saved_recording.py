"""`load_recording`: read a recording from the file that `Recording.save` wrote."""

from __future__ import annotations

from pathlib import Path

from regard.capture.cache_joining import JoinedCalls
from regard.lens.recording import Recording
from regard.lens.serialization import read_calls


def load_recording(path: str | Path) -> Recording:
    """Read a recording that `Recording.save` wrote.

    Args:
        path: A safetensors file written by `recording.save(path)`.

    Returns:
        The recording: `recording[name]`, `recording.heads()` and the rest work as before it was saved.

    Raises:
        ArgumentError: If the file is not a saved recording.

    >>> import regard, tempfile, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     _ = layer(torch.ones(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recording.save(f"{folder}/recording.safetensors")
    ...     again = regard.load_recording(f"{folder}/recording.safetensors")
    >>> again
    Recording(1 layer, 216 bytes held)
      self_attn: (batch 1, heads 2, q_len 3, kv_len 3)
    """
    saved = read_calls(path)
    recording = Recording()
    recording._cache_faults = saved.cache_faults
    recording._module_hints.causal = saved.causal
    recording._module_hints.image_runs = saved.image_runs
    recording._module_hints.image_passes = saved.image_passes
    recording._trace.events = saved.events
    for call in saved.calls:
        # JoinedCalls derives it for a single call, which is wrong for joined ones.
        query_offset = call.query_offset
        recording._joined_calls.setdefault(call.name, []).append(JoinedCalls(call))
        call.query_offset = query_offset
    return recording
