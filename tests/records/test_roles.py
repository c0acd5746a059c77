"""The roles of heads: one table in the glossary, from the registry."""

import pathlib

from mha_haiku.lab import heads
from mha_haiku.records import roles

_README = pathlib.Path(__file__).parents[2] / "mha_haiku" / "README.md"


def test_the_glossary_has_the_roles_as_they_are_registered():
    text = _README.read_text("utf-8")
    rows = [
        f"| `{name}` | {role.attends} | {role.label} | {role.threshold:g} |"
        for name, role in roles.ROLES.items()
    ]
    assert "\n".join(rows) in text and f"`{roles.NO_CLEAR_ROLE}`" in text


def test_a_score_has_the_name_of_its_role_unless_two_roles_share_it():
    shared = {"uniform", "broad"}
    assert {*heads.ROLES} - shared == {*heads.SCORES} - {"relative_entropy"}
