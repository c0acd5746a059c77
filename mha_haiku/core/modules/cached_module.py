"""Modules that run whole texts, and texts token by token with a cache."""

from typing import Any

import haiku as hk
import jax


class CachedModule(hk.Module):
    """A module with two public methods, `__call__` and `step`, and one path, `_run`.

    Haiku puts the name of a method into the names of parameters and scopes, and so of
    sites, unless it is `__call__`. Both methods are therefore transparent to Haiku and
    enter `_run` by the `__call__` here, so that their names are the same.
    """

    def __call__(self, *args, **options):
        return self._run(*args, **options)

    @hk.transparent
    def step(self, *args, cache: Any, first_query: int | jax.Array = 0, **options):
        """Runs one step: the output, and the cache of the next step; no dropout.

        Args:
          cache: What computes attention, and keeps keys and values: an
            `attention.Prompt` for the tokens of prompts, then the `attention.Cache`
            that is returned for one new token at a time. Of a decoder layer a pair, of
            self-attention and cross-attention; of a stack one for each layer. Where it
            has the keys of a source, what they are made of is not read.
          first_query: The position of the first token.

        Other arguments and sites are as in a call; masks go by name.

        Raises:
          ValueError: If dropout is asked for; else as a call.
        """
        for name in ("is_training", "dropout_rate"):
            if options.get(name):
                raise ValueError(
                    f"{name} must be left out of step, which has no dropout, got "
                    f"{options[name]!r}."
                )
        given = {"cache": cache, "first_query": first_query}
        return CachedModule.__call__(self, *args, **given, **options)
