"""The traffic of programs, against known traffic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.benchmarks import compiled_traffic

_SPEC = jax.sharding.PartitionSpec
_BYTES = 8 * 4  # of what one device has


def _sent(function, out_specs):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    shared = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=_SPEC(("a", "b")),
        out_specs=out_specs,
        check_vma=False,
    )
    compiled = jax.jit(shared).lower(jnp.ones(32)).compile()
    return compiled_traffic.of_program(compiled.as_text()).by_kind


def _around(x, *, times):
    pairs = [(0, 1), (1, 0)]

    def step(_, x):
        return jax.lax.ppermute(x * 2, "a", pairs)

    return jax.lax.fori_loop(0, times, step, x)


@pytest.mark.parametrize(
    ("function", "out_specs", "wanted"),
    [
        (lambda x: jax.lax.psum(x, ("a", "b")), _SPEC(), {"all-reduce": 1.5 * _BYTES}),
        (lambda x: jax.lax.psum(x, "b"), _SPEC("a"), {"all-reduce": _BYTES}),
        (
            lambda x: jax.lax.all_gather(x, ("a", "b"), tiled=True),
            _SPEC(),
            {"all-gather": 3 * _BYTES},
        ),
        (
            functools.partial(_around, times=5),
            _SPEC(("a", "b")),
            {"collective-permute": 5 * _BYTES},
        ),
        (
            lambda x: jax.lax.ppermute(x, "a", [(0, 0), (1, 1)]),
            _SPEC(("a", "b")),
            {"collective-permute": 0},
        ),
        (lambda x: x * 2, _SPEC(("a", "b")), {}),
    ],
    ids=["all", "some", "gather", "loop", "to itself", "nothing"],
)
def test_bytes_are_those_that_the_collectives_send(function, out_specs, wanted):
    assert _sent(function, out_specs) == wanted


def test_groups_that_are_not_understood_are_not_guessed():
    text = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %y = f32[8] all-reduce(%x), y=1\n}"
    with pytest.raises(ValueError, match="a collective of unknown groups"):
        compiled_traffic.of_program(text)
