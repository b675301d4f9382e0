"""Everything is declared in pyproject.toml; this only keeps modules that were deleted out of wheels."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class CleanBuildPy(build_py):
    """Starts from an empty build folder: setuptools would pack what an earlier build left there."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": CleanBuildPy})
