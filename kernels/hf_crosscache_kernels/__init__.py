"""Kernels of hf_crosscache: a leaf package that needs torch alone, each operation with its plain-torch reference."""

from ._launch import BACKEND, backend_for
from .moments import accumulate_moments
from .reference import accumulate_moments_reference, translate_kv_reference, weighted_products_reference
from .translate import translate_kv, weight_dtypes

__all__ = [
    "BACKEND",
    "accumulate_moments",
    "accumulate_moments_reference",
    "backend_for",
    "translate_kv",
    "translate_kv_reference",
    "weight_dtypes",
    "weighted_products_reference",
]
