"""Compiles the native kernels when the package is built or installed, if there is a compiler."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """Puts one library per instruction set into the wheel, and names its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; without a compiler the wheel is pure Python and runs on `torch`."""
        path = Path(self.root) / "src" / "foretoken" / "ops" / "backends" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("foretoken_native_build", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {path}")
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            native.build()
        except (native.BuildError, OSError) as error:
            self.app.display_warning(f"Native kernels were not built: {error}.")
            return
        build_data["artifacts"].append("src/foretoken/ops/backends/native/lib/*.so")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
