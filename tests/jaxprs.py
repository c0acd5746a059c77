"""The arrays that a program makes, read from its jaxpr."""

import jax
import jax.extend


def largest_array(jaxpr: jax.extend.core.Jaxpr) -> int:
    """Returns the size of the largest array that a jaxpr and those inside make."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [variable.aval.size for variable in equation.outvars]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            sizes.append(largest_array(inner))
    return max(sizes)
