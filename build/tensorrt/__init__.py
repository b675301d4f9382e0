"""The program as a TensorRT network, and engines built from it."""
