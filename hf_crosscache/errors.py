"""Errors of the library: each names the layer and the side, what was expected, what came, and how to mend it."""


class CrossCacheError(ValueError):
    """Base of every error that the library raises on purpose."""


class UnsupportedModelError(CrossCacheError):
    """The model has layers or position embeddings that the library would translate wrongly."""


class GeometryError(CrossCacheError):
    """Tensors or models do not have the shapes that a translator was fitted for."""


class IdentityError(CrossCacheError):
    """A translator was given another model or tokenizer than the one it was fitted on."""


class AlignmentError(CrossCacheError):
    """Two tokenizers cannot be lined up over one text: tokens that do not spell it, or that nobody can spell."""


class CalibrationError(CrossCacheError):
    """The calibration texts cannot carry a fit: too few, too short, or not finite."""


class HandOffError(CrossCacheError):
    """A translated cache cannot be built, or used, as asked."""


class HandOffWarning(UserWarning):
    """A hand-off goes on, but not as it should: a translator that keeps little, or states that the target had to read itself."""


class ArtefactError(CrossCacheError):
    """A saved translator is missing, incomplete or damaged."""
