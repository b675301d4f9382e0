"""The definition is already vectorised."""

from hybridtrt.plugins.router.reference import router

__all__ = ["router"]
