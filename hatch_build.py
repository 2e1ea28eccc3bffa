"""Build hook: put the compiled measure pass into the wheel if there is a C compiler.

With the library inside, the wheel is for one platform and any Python 3, since ctypes loads the library. Without a
compiler the wheel is pure. An editable install compiles in place.
"""

from __future__ import annotations

import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/regard/engines/native")


class CompileMeasures(BuildHookInterface[Any]):
    """Compile the library of the measure pass and add it to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = runpy.run_path(str(Path(self.root, NATIVE, "build.py")))
        if version == "editable":
            build["compile_library"](Path(self.root, NATIVE))
            return
        self._folder = tempfile.TemporaryDirectory()
        library = build["compile_library"](Path(self._folder.name))
        if library is not None:
            build_data["force_include"][str(library)] = f"regard/engines/native/{library.name}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()
