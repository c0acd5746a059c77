"""Modules that run whole texts, and texts token by token with a cache."""

import haiku as hk


class CachedModule(hk.Module):
    """A module with two public methods, `__call__` and `step`, and one path, `_run`.

    Haiku puts the name of a method into the names of parameters and scopes, and so of
    sites, unless it is `__call__`. Both methods are therefore transparent to Haiku and
    enter `_run` by `super().__call__`, so that their names are the same.
    """

    def __call__(self, *args, **options):
        return self._run(*args, **options)
