"""Tasks with one label for the whole input: dumps, importance, and what is refused."""

from typing import ClassVar

import jax
import numpy as np
import pytest

from mha_haiku import subjects, tasks
from mha_haiku.core.checks import ConfigError
from mha_haiku.records.map_set import MapSet
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import dumps
from mha_haiku.training.runs import configuration
from tests import tiny_runs

B, T, C = 2, 5, 3


class Sized(tiny_runs.Shifted):
    """Is the first token small, medium or large?"""

    name: ClassVar[str] = "sized"
    labels_whole: ClassVar[bool] = True
    held_out_data = ()

    def example(self, key, data):
        inputs = super().example(key, np.zeros(1, np.int32)).inputs
        label = inputs[0] // 3
        length = 2 + inputs[1] % 4
        return tasks.Example(inputs, label, tasks.base.all_count(label), length)

    def class_label(self, c):
        return ("small", "medium", "large")[c]


@pytest.mark.parametrize(
    ("family", "pool", "message"),
    [
        ("encoder", None, "pool must be 'first' or 'mean' for the task"),
        ("set_classifier", None, "family must be 'encoder' or 'causal'"),
        ("causal", "first", "pool must be 'mean' for the task"),
        ("causal", "mean", None),
        ("encoder", "first", None),
    ],
)
def test_model_must_have_one_answer_for_the_whole(family, pool, message, make_config):
    config = make_config(model__family=family, model__output__pool=pool)
    if message is None:
        configuration.validate_for_task(config, Sized(num_classes=C))
        return
    with pytest.raises(ConfigError, match=message):
        configuration.validate_for_task(config, Sized(num_classes=C))


@pytest.mark.slow
def test_maps_and_importance_of_a_run(of_task, tmp_path):
    loaded = of_task(
        Sized(num_classes=C), model__output__pool="first", model__dropout_rate=0.0
    )
    subject = Subject.of_folder("anywhere")
    path = dumps.dump(subject, out=tmp_path, examples=B, means=False)
    saved = MapSet.load(path).examples
    example = loaded.examples(B)
    output = jax.jit(
        lambda x: (
            loaded.model.apply(
                loaded.params, None, x.inputs, lengths=x.lengths, is_training=False
            ).logits
        )
    )(example)
    assert output.shape == (B, C)
    labels = [loaded.task.class_label(int(c)) for c in output.argmax(-1)]
    assert [each.answers.likeliest[0][0][0] for each in saved] == labels
    wanted = [(loaded.task.class_label(int(c)),) for c in example.targets]
    assert [each.answers.targets for each in saved] == wanted
    assert all(each.answers.whole for each in saved)
    lengths = [len(each.queries.tokens) for each in saved]
    assert lengths == example.lengths.tolist()
    shortest = min(lengths)
    assert shortest < T and saved[lengths.index(shortest)].note == (
        f"its last {T - shortest} positions are padding"
    )
    assert dumps.write_report(tmp_path)[-1].name == "index.html"

    path = dumps.dump(subject, own=[3, 1, 4], out=tmp_path / "own")
    answers = MapSet.load(path).examples[0].answers
    ((likeliest,), targets) = answers.likeliest, answers.targets
    assert targets == ("",)
    np.testing.assert_allclose(sum(share for _, share in likeliest), 1, atol=1e-6)

    importance = subjects.Subject.of_run(loaded, "run").importance("gradient", B)
    assert importance.mean.shape == (2, 2) and np.isfinite(importance.mean).all()
