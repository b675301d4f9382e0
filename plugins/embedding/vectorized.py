"""The definition is already vectorised."""

from hybridtrt.plugins.embedding.reference import embedding

__all__ = ["embedding"]
