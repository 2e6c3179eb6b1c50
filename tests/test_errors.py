"""Every error of the library can be caught as one, and as the ValueError it is."""

import inspect

from hf_crosscache import CrossCacheError, errors
from hf_crosscache.errors import HandOffWarning


def test_errors_are_one_family():
    family = [e for _, e in inspect.getmembers(errors, inspect.isclass) if e is not HandOffWarning]
    assert len(family) == 8 and all(issubclass(e, CrossCacheError) and issubclass(e, ValueError) and e.__doc__ for e in family)


def test_what_goes_on_warns():
    assert issubclass(HandOffWarning, UserWarning) and HandOffWarning.__doc__
