"""The fixture that runs command lines."""

from __future__ import annotations

import pytest


@pytest.fixture
def run(capsys):
    """Runs a command line in this process, checks its exit code, and returns standard output and standard error."""
    from regard.cli import main

    def run(*arguments, code=0):
        assert main([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return run
