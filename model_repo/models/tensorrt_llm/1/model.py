"""Token ids in, token ids out, on the engine process."""

from hybridtrt.model_repo.backend import TokenModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
