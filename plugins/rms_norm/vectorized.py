"""The definition is already vectorised."""

from hybridtrt.plugins.rms_norm.reference import rms_norm

__all__ = ["rms_norm"]
