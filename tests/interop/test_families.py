"""Models of each family are pruned and divided; test_parity.py has their numbers."""

import chex
import jax
import numpy as np
import pytest

from mha_haiku import devices, heads, interop, models
from mha_haiku.core import sites
from tests.interop import small_models


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("case", small_models.CASES)
def test_pruned_equals_gated_in_every_family(case, tmp_path):
    imported = interop.load(small_models.write(tmp_path, case))
    num_heads = imported.config.attention.num_heads
    keep = np.ones((2, num_heads), bool)
    keep[0, 1] = keep[1, 0] = keep[1, 2] = False
    if imported.config.attention.qk_norm_over == "layer":  # its heads share a norm
        with pytest.raises(ValueError, match="Ablate the head instead"):
            heads.prune(imported.params, imported.config, keep)
        return
    params, config = heads.prune(imported.params, imported.config, keep)
    sizes = interop.sizes_of(imported.params)
    pruned = models.build(config, **sizes._asdict())
    given, lengths = given_of(case)
    gated_apply = sites.edit(imported.model.apply, heads.edits.gate(1.0 * keep))

    @jax.jit
    def run(params, params_of_gated):
        options = {"lengths": lengths, "is_training": False}
        found = pruned.apply(params, None, given, **options)
        gated = gated_apply(params_of_gated, None, given, **options)
        return found.output, gated.output

    found, gated = run(params, imported.params)
    assert_close(small_models.valid(found, 1), small_models.valid(gated, 1))


@pytest.mark.slow
def test_classes_of_images_are_learned_the_same_on_two_devices(tmp_path):
    """ViT has no task as a run; others: tests/subjects/verbs/test_imported_runs.py."""
    imported = interop.load(small_models.write(tmp_path, "vit"))
    sizes = interop.sizes_of(imported.params)
    given, _ = given_of("vit")
    mesh = devices.make_mesh(jax.local_devices()[:2], data=1, heads=2, sequence=1)
    shared = devices.Sharded(mesh)
    divided = models.build(
        imported.config, **sizes._asdict(), implementation=shared.implementation("auto")
    )

    def gradient(model, params):
        def loss(params):
            logits = model.apply(params, None, given, is_training=True).logits
            return -jax.nn.log_softmax(logits)[np.arange(len(logits)), [3, 0, 2]].sum()

        return jax.jit(jax.grad(loss))(params)

    wanted = gradient(imported.model, imported.params)
    found = gradient(divided, shared.put_state(imported.params))
    query = found["encoder/layer_0/attention/query"]["w"]
    assert {x.data.shape for x in query.addressable_shards} == {(24, 12)}
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    assert 0 < largest < np.inf
    chex.assert_trees_all_close(found, wanted, rtol=0, atol=1e-5 * largest)


def given_of(case):
    """Returns inputs of a case's model, and their lengths."""
    given = small_models.inputs(case)
    if case.startswith("vit"):
        return interop.patches(given, 4), None
    return given, small_models.LENGTHS
