"""hybridtrt: hybrid LLM checkpoints to engines with in-flight batching, served by Triton Inference Server."""

__version__ = "0.1.0"
