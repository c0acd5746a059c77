import pytest

from mha_haiku import tasks
from mha_haiku.core import checks


@pytest.mark.parametrize("name", tasks.names())
def test_a_task_is_found_by_the_name_that_it_has(name):
    task = tasks.of_name(name)
    assert task.name == tasks.register(task) == name
    assert tasks.digest(name) is None


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
