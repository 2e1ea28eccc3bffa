"""Recordings with hostile headers: safetensors files whose bytes, tensor table or calls are changed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.inputs import change_bytes, change_json
from tests.fuzz.runner import RunInput, Target


def write_recordings(folder: Path) -> list[bytes]:
    """Record a few layers with masks, modifications, measures and values, and return the files."""
    import torch

    import regard

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(3)
    files = []
    for options, call in (
        ({}, {}),
        ({"values": True}, {"src_mask": causal, "is_causal": True}),
        ({"copy": True}, {"src_key_padding_mask": torch.tensor([[False, False, True]] * 2)}),
        ({}, {"src_mask": torch.randn(3, 3)}),
        ({"measures": {"top": regard.TopK(2), "entropy": regard.Entropy()}}, {}),
    ):
        with regard.watch(layer, **options) as recording:
            layer(x, **call)
        path = folder / f"{len(files)}.safetensors"
        recording.save(path)
        files.append(path.read_bytes())
    return files


def read_recording(path: Path) -> None:
    """Load a recording and use what it holds."""
    import regard

    recording = regard.load_recording(path)
    repr(recording)
    for name in recording:
        for call in recording.calls(name):
            repr(call.compact_mask)
            assert len(call.shape) >= 2
            if call.measures is None:
                call.matrix.entropy()
            else:
                repr(call.measures)


def build_bytes(folder: Path) -> RunInput:
    files, path = write_recordings(folder), folder / "changed.safetensors"

    def run(rng: Random) -> None:
        path.write_bytes(change_bytes(rng, rng.choice(files)))
        read_recording(path)

    return run


def build_headers(folder: Path) -> RunInput:
    parts, path = [_split(data) for data in write_recordings(folder)], folder / "changed.safetensors"

    def run(rng: Random) -> None:
        header, calls, data = rng.choice(parts)
        header = dict(header)
        if rng.random() < 0.15:
            header = change_json(rng, header)
        else:
            text = json.dumps(change_json(rng, calls))
            if rng.random() < 0.1:
                text = change_bytes(rng, text.encode()).decode("utf-8", "replace")
            header["__metadata__"] = {"regard": text}
        table = json.dumps(header).encode("utf-8", "surrogatepass")
        path.write_bytes(struct.pack("<Q", len(table)) + table + data)
        read_recording(path)

    return run


def _split(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Split a file into the table of tensors, the calls and the numbers."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return header, json.loads(header["__metadata__"]["regard"]), data[8 + size :]


TARGETS = (Target("recording-bytes", 120, build_bytes), Target("recording-headers", 200, build_headers))
