"""Choosing one token a row: greedy, or sampled with temperature, top-k and top-p from a counter-based generator."""

from hybridtrt.plugins.sample.params import Sampled, SampleParams

__all__ = ["SampleParams", "Sampled"]
