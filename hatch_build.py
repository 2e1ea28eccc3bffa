"""Hooks of the build: absolute links in the readme, and the compiled measure pass in the wheel.

The pass is compiled if there is a C compiler. With the library inside, the wheel is for one platform and any Python 3,
since ctypes loads the library. Without a compiler the wheel is pure. An editable install compiles in place.
REGARD_PLATFORM, a variable that scripts/release sets, makes the wheel of another platform.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

NATIVE = Path("src/regard/engines/native")


class AbsoluteLinks(MetadataHookInterface):
    """Make the relative links and pictures of README.md absolute, since a package index has no files beside it."""

    def update(self, metadata: dict[str, Any]) -> None:
        source, version = metadata["urls"]["Source"], metadata["version"]
        tag = "main" if ".dev" in version else f"v{version}"
        pictures = source.replace("//github.com/", "//raw.githubusercontent.com/")
        text = Path(self.root, "README.md").read_text("utf-8")
        text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{pictures}/{tag}/", text)
        text = re.sub(r"(?<!!)(\[[^]!]*\]\()(?!https?:|#)", rf"\1{source}/blob/{tag}/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class CompileMeasures(BuildHookInterface[Any]):
    """Compile the library of the measure pass and add it to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = runpy.run_path(str(Path(self.root, NATIVE, "build.py")))
        if version == "editable":
            build["compile_library"](Path(self.root, NATIVE))
            return
        self._folder = tempfile.TemporaryDirectory()
        platform = os.environ.get("REGARD_PLATFORM", "")
        library = build["compile_library"](Path(self._folder.name), platform)
        if library is None and platform:
            sys.exit(f"the wheel of {platform} needs its library")
        if library is not None:
            build_data["force_include"][str(library)] = f"regard/engines/native/{library.name}"
            build_data["pure_python"] = False
            platform = platform or sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()
