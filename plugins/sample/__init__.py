"""Choosing one token a row: greedy, or sampled with temperature, top-k, top-p and min-p, with numbers from counters."""

from hybridtrt.plugins.sample.params import Sampled, SampleParams

__all__ = ["SampleParams", "Sampled"]
