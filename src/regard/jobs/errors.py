"""The error of a survey that cannot continue."""

from __future__ import annotations

from regard.errors import RegardError


class SurveyError(RegardError, RuntimeError):
    """A survey that cannot continue. Committed shards are kept, and the same call resumes the survey."""
