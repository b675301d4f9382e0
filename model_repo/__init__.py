"""The Triton model repository, its supervisor and the clients."""
