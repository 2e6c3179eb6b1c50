"""Carry a conversation's KV cache from one language model to another."""

from .arithmetic import hand_off_cost
from .cache import TranslatedCache
from .calibration import Calibration
from .errors import CrossCacheError
from .evaluation import Evaluation, evaluate_translator
from .fitter import TranslatorFitter
from .fitting import fit_translator
from .geometry import CacheGeometry
from .handoff import HandoffSession
from .moments import WeightedMoments
from .refinement import Refinement, refine_translator
from .retokenizing import Retokenizer
from .texts import Document
from .translator import CacheTranslator
from .tuning import tune_translator

__all__ = [
    "CacheGeometry",
    "CacheTranslator",
    "Calibration",
    "CrossCacheError",
    "Document",
    "Evaluation",
    "HandoffSession",
    "Refinement",
    "Retokenizer",
    "TranslatedCache",
    "TranslatorFitter",
    "WeightedMoments",
    "evaluate_translator",
    "fit_translator",
    "hand_off_cost",
    "refine_translator",
    "tune_translator",
]
__version__ = "0.1.0"
