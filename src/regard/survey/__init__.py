"""Measure the heads of a model over a corpus of documents.

`run` writes one Parquet row of constant size per document, layer and head; `open` reads the rows back.
`regard.survey.schema` describes the columns. May import every package below it; only `regard.cli` is above.

Design notes:
- A worker writes a shard beside its final path, flushes it and reads it back. The driver alone renames it and appends
  one line with a checksum to the manifest; quarantined documents are part of both.
- The model runs in a separate process. Workers record the current document on disk, so a document that kills its
  worker can be identified and quarantined.
- A document's id is its position in the corpus. A window of 2ᵏ keys is the first k + 1 bins of the distance histogram.
- Files are not compressed, so their size shows that rows have constant size. Readers go file by file, because a dataset
  scan keeps the metadata of every file in memory.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.survey.dataset import Survey, open
from regard.survey.driver import run
from regard.survey.errors import SurveyError
from regard.survey.progress import Progress

__all__ = ["Progress", "Survey", "SurveyError", "open", "run"]

set_public_module(globals())
