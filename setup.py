"""Everything is declared in pyproject.toml; this compiles the C++ kernels and keeps deleted modules out of wheels."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARY = "hybridtrt.plugins.native._cpu"


def load_compiler():
    """The module that compiles; the package itself is not there yet."""
    spec = importlib.util.spec_from_file_location("compile", ROOT / "src/hybridtrt/plugins/native/compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CleanBuildPy(build_py):
    """Starts from an empty build folder: setuptools would pack what an earlier build left there."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildKernels(build_ext):
    """Compiles the library as compile.py does. Where that fails there is a warning, and hybridtrt runs on torch."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # it is loaded by ctypes, and knows nothing of Python

    def build_extension(self, ext: Extension) -> None:
        compiler = load_compiler()
        try:
            compiler.compile_library(Path(self.get_ext_fullpath(ext.name)), ROOT / ".cache/native")
        except compiler.CompileError as error:
            print(f"warning: the C++ kernels were not compiled; models will run on torch: {error}", file=sys.stderr)


setup(
    cmdclass={"build_py": CleanBuildPy, "build_ext": BuildKernels},
    ext_modules=[Extension(LIBRARY, sources=[], optional=True)],
)
