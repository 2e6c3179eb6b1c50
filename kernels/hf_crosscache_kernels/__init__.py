"""Kernels of hf_crosscache: a leaf package that needs torch alone, each operation with its plain-torch reference."""

from .reference import map_heads_reference, weighted_products_reference

__all__ = ["map_heads_reference", "weighted_products_reference"]
