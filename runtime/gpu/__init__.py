"""Serving a TensorRT engine: device memory, the step as bindings, CUDA graphs for decoding."""
