"""Loading TensorRT-RTX's libraries so that its ONNX parser finds them.

The parser opens `libtensorrt_rtx.so`, while the package ships `libtensorrt_rtx.so.1` alone, and ends the process where
it does not find it. Both libraries look beside themselves for others. So they are loaded, before the bindings are
imported, by links in a folder of ours that has both names; the loader knows them as one by their file.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "tensorrt_rtx_bindings"
_LIBRARIES = ("libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so")


@cache
def tensorrt_rtx() -> Any:
    """The module of TensorRT-RTX.

    Raises `ValueError` where it is not installed, and where another imported it: its parser would end the process.
    """
    if PACKAGE in sys.modules:
        raise ValueError(
            f"{PACKAGE} was imported before its libraries were loaded in a way that its parser can be used"
        )
    _load()
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ValueError(f"target tensorrt-rtx needs TensorRT-RTX ({error}): pip install 'hybridtrt[gpu]'") from None


def _load() -> None:
    """Load the package's libraries through links; where there is no such package, the bindings find theirs alone."""
    found = importlib.util.find_spec("tensorrt_rtx_libs")
    if found is None or found.origin is None:
        return
    shipped = {path.name: path for path in Path(found.origin).parent.glob("*.so.*")}
    links = Path(tempfile.mkdtemp(prefix="hybridtrt-rtx-"))
    atexit.register(shutil.rmtree, links, ignore_errors=True)  # the parser opens them later, when it is first used
    for name, path in shipped.items():
        for link in (name, name.partition(".so")[0] + ".so"):
            (links / link).symlink_to(path)
    for library in _LIBRARIES:
        for name in shipped:
            if name.startswith(library):
                ctypes.CDLL(str(links / name))
