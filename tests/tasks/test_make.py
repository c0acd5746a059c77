import pytest

from mha_haiku import tasks
from mha_haiku.core import checks


def test_names_are_what_make_knows():
    assert tasks.names() == (
        "reverse",
        "copy",
        "sort",
        "histogram",
        "associative_recall",
        "bigram_backcopy",
        "induction",
        "modular_addition",
        "parity",
        "digits_anomaly",
        "masked_language_model",
        "language_model",
        "sentences",
        "reverse_seq2seq",
        "number_words",
        "pronounce",
        "classify",
        "max_retrieval",
        "markov_chains",
    )


def test_make_gives_the_task_of_that_name():
    task = tasks.make("reverse", sequence_length=5, num_tokens=7)
    assert task.name == "reverse"
    assert (task.sequence_length, task.num_tokens) == (5, 7)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("revese", {}, r"^config.task.name must be one of .* Did you mean 'reverse'\?"),
        (
            "reverse",
            {"sequence_lenght": 5, "num_tokens": 7},
            r"^reverse has no option 'sequence_lenght'; it has sequence_length, "
            r"num_tokens. Did you mean 'sequence_length'\?",
        ),
        ("reverse", {"sequence_length": "5", "num_tokens": 7}, "^sequence_length must"),
    ],
)
def test_mistakes_are_refused_by_name(name, options, message):
    with pytest.raises(checks.ConfigError, match=message):
        tasks.make(name, **options)
