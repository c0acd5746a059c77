"""The same fixtures as for the package's own tasks."""

from tests.tasks.conftest import sampled, worked_example  # noqa: F401
