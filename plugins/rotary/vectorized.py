"""The definitions are already vectorised."""

from hybridtrt.plugins.rotary.reference import rotary, rotary_table

__all__ = ["rotary", "rotary_table"]
