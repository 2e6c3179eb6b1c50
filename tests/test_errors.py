"""Every error of the library can be caught as one, and as the ValueError it is."""

import inspect

from hf_crosscache import CrossCacheError, errors


def test_errors_are_one_family():
    family = [e for _, e in inspect.getmembers(errors, inspect.isclass)]
    assert len(family) == 7 and all(issubclass(e, CrossCacheError) and issubclass(e, ValueError) and e.__doc__ for e in family)
