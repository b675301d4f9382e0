"""Text in, text out, on the engine process."""

from hybridtrt.model_repo.backend import TextModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
