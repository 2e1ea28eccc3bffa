"""Measure the heads of a model over a corpus of documents.

`run` writes one Parquet row of constant size per document, layer and head; `load` reads the rows back. `RunOptions`
lists how a model can be run over a corpus, and `regard.survey.schema` describes the columns. May import every package
below it, such as `regard.jobs`, which runs the model; only `regard.cli` is above.

A window of 2ᵏ keys is the first k + 1 bins of the distance histogram.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.jobs.driver import Progress
from regard.jobs.options import RunOptions
from regard.jobs.worker import SurveyError
from regard.survey.dataset import Survey, load
from regard.survey.driver import run

__all__ = ["Progress", "RunOptions", "Survey", "SurveyError", "load", "run"]

set_public_module(globals())
