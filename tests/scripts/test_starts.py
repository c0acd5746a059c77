"""Every script starts: its imports are there, and `--help` says what it is."""

import pathlib
import runpy
import sys

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_SCRIPTS = [
    str(path.relative_to(_REPOSITORY))
    for path in sorted(_REPOSITORY.glob("scripts/**/*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("script", _SCRIPTS)
def test_help_is_shown(script, monkeypatch, capsys):
    for variable in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):  # which scripts set
        monkeypatch.setenv(variable, "")
    path = _REPOSITORY / script
    elsewhere = [x for x in sys.path if pathlib.Path(x).resolve() != _REPOSITORY]
    monkeypatch.setattr(sys, "path", [str(path.parent), *elsewhere])
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr()
    assert not ended.value.code, told.err
    assert "--help" in told.out
