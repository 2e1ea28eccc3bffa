"""Measure the attention of live requests in a vLLM server, and read the records that it writes.

vLLM finds the plugin by its entry points. It measures nothing unless the server is started with
`--additional-config '{"regard": {…}}'` or the variable REGARD_VLLM. `load(folder)` opens the records, and `find_spans`
finds the parts of a prompt that a request names. Import what reads records, such as `load`, on any machine; the plugin
itself runs in vLLM's processes. The package imports `regard.lens` and below, torch, and vLLM inside functions.

One file for each concept, in the order of a request:

- `settings`: what a server measures, and what a request asks for.
- `worker`: the plugin in vLLM's workers; the only module that knows how an engine runs its steps.
- `layers`: what an attention layer computes, and why some are not measured.
- `paged_cache`: read keys from a paged cache, whose order is learned when the engine starts.
- `measured_request`: the numbers of one request.
- `delivery`: background threads that write files and export spans.
- `record_files`: the format of the files.
- `server`: the route `GET /regard/<id>`, and spans of a prompt.
- `request_log`: `load`, tables and the answer page.

Design notes:
- Queries are read where the model computes them, but keys stay in the cache until a request has 16 rows or ends. One
  call of `A.measure` for all rows and layers then costs a tenth of a call in every step. Rows are measured earlier if
  the scheduler is about to reuse blocks: at a preemption, at the end, and when a window passes a block.
- The layout of a cache is not written down. It is learned by writing known keys with the backend's own function, which
  serves backends and instruction sets that could not be run here. A layout that can be learned is verified with random
  keys, and the plugin turns itself off otherwise.
- `forward` is replaced on the objects of the layers, and only in steps with a measured request. Other steps cost one
  call per step and none per layer.
- The scheduler tells the workers the length of each answer. A worker does not know it: steps are scheduled ahead, and
  a row past the end of the answer may have been computed.
- Tensor-parallel ranks write their own heads, and `load` joins them. Joining them in the workers would need a
  collective call, which a failure on one rank would block forever.

>>> import json
>>> from regard.vllm import Settings
>>> settings = Settings(rate=0.01, folder="attention")
>>> json.dumps({"regard": {"rate": settings.rate, "folder": settings.folder}})  # the value of --additional-config
'{"regard": {"rate": 0.01, "folder": "attention"}}'
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 - required by every module of the package
except ImportError as error:
    raise ImportError("regard.vllm: torch is not installed. pip install 'regard[torch]'") from error

from regard._public import set_public_module
from regard.vllm.request_log import RequestLog, RequestRecord, load
from regard.vllm.server import find_spans
from regard.vllm.settings import Settings

__all__ = ["RequestLog", "RequestRecord", "Settings", "find_spans", "load"]

set_public_module(globals())
