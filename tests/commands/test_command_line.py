"""A user's mistake costs exit status 2 and two lines; --help shows every field."""

import inspect
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import pytest

from mha_haiku import commands, runs
from mha_haiku.commands import config_files, process
from mha_haiku.core import checks, fields
from mha_haiku.subjects.subject import Subject

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_REVERSE = "--config=configs/reverse.py"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Stands in for training; holds what it was called with."""
    from mha_haiku.subjects.verbs import dumping
    from mha_haiku.training.runs import loop

    calls = types.SimpleNamespace(interrupted=False, error=None)

    def stand_in(config, workdir, **options):
        calls.config, calls.workdir, calls.options = config, workdir, options
        if calls.error is not None:
            raise calls.error
        return types.SimpleNamespace(interrupted=calls.interrupted)

    def load(workdir, step=None, trust=False):
        calls.workdir, calls.step = workdir, step
        return workdir

    def dump(workdir, **options):
        calls.dump_options = options
        return pathlib.Path(workdir, "attention", "maps.npz")

    monkeypatch.setattr(loop, "train", stand_in)
    monkeypatch.setattr(dumping, "dump", dump)
    monkeypatch.setattr(Subject, "of_folder", load)
    monkeypatch.setattr(dumping, "write_report", lambda *_, **options: None)
    return calls


def _train(*arguments):
    return commands.run(["train", *arguments, "--compilation_cache="])


def _config_file(source):
    path = pathlib.Path("my_config.py")
    path.write_text(source)
    return f"--config={path}"


def _mistake(capsys, status):
    """Returns what the user is told."""
    out, told = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert "Traceback" not in told
    assert 1 <= len(told.splitlines()) <= 2, told
    return told


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["--config=... is missing", "configs/reverse.py"]),
        (["--confg=configs/reverse.py"], ["--confg", "Did you mean '--config'?"]),
        ([_REVERSE, "--wrkdir=x"], ["--wrkdir", "Did you mean '--workdir'?"]),
        ([_REVERSE, "--model.num_layers=2"], ["'--config.model.num_layers'?"]),
        (
            ["--confg.model.attention.num_heads=2"],
            ["'--config.model.attention.num_heads'?"],
        ),
        ([_REVERSE, "stray"], ["'stray' belongs to no flag", "--workdir"]),
        ([_REVERSE, "--debug=perhaps"], ["--debug=perhaps"]),
        ([_REVERSE, "--workdir"], ["--workdir"]),
        ([_REVERSE, "--format=png,bmp"], ["formats must be one of", "pdf", "'bmp'"]),
        ([_REVERSE, "--format="], ["formats must name one"]),
        (
            ["--config=configs/revers.py"],
            ["'configs/revers.py'", "'configs/reverse.py'?"],
        ),
        (["--config=reverse"], ["'reverse'", "'configs/reverse.py'?"]),
        (["--config=."], ["there is no file '.'"]),
        (
            [_REVERSE, "--config.model.num_head=2"],
            ["'config.model.attention.num_heads'?"],
        ),
        (
            [_REVERSE, "--config.num_heads=2"],
            ["'config.model.attention.num_heads'?", "optimizer"],
        ),
        ([_REVERSE, "--config.steps=9"], ["Did you mean 'config.training.steps'?"]),
        ([_REVERSE, "--config.seed.x=2"], ["config.seed.x"]),
        ([_REVERSE, "--config.model=2"], ["sets no field", "num_layers"]),
        (
            [_REVERSE, "--config.model.attention=dense"],
            ["sets no field", "config.model.attention has the fields"],
        ),
        (
            [_REVERSE, "--config.model.implementation=dense"],
            ["'config.model.attention.implementation'?"],
        ),
        ([_REVERSE, "--config.="], ["no such field"]),
        (
            [_REVERSE, "--config.model.attention.num_heads=two"],
            ["an integer", "'two'", "1"],
        ),
        ([_REVERSE, "--config.model.attention.num_heads=2.5"], ["an integer", "'2.5'"]),
        ([_REVERSE, "--config.optimizer.b1=high"], ["a number", "'high'", "0.9"]),
        ([_REVERSE, "--config.model.attention.qk_norm=2"], ["true or false", "'2'"]),
        (
            [_REVERSE, "--config.model.attention.key_size=x"],
            ["an integer", "None", "'x'"],
        ),
    ],
)
def test_a_mistaken_command_line_names_the_mistake_and_the_choices(
    capsys, arguments, parts
):
    told = _mistake(capsys, commands.run(["train", *arguments]))
    for part in parts:
        assert part in told


@pytest.mark.parametrize(
    "source, parts",
    [
        ("def get_config(:\n", ["my_config.py is not Python, line 1"]),
        ("x = 1\n\0", ["my_config.py is not Python"]),
        ("x = 1\n", ["no get_config()"]),
        ("get_config = 3\n", ["raised TypeError"]),
        ("def get_config():\n  return 3\n", ["RunConfig", "got int"]),
        ("def get_config():\n  return 1 / 0\n", ["my_config.py raised ZeroDivision"]),
        ("import no_such_module\n", ["my_config.py raised ModuleNotFoundError"]),
        ("raise ValueError('a\\nb\\nc\\nd')\n", ["raised ValueError: a", "b c d"]),
        ("raise SystemExit('no text')\n", ["raised SystemExit: no text"]),
        ("class E(BaseException):\n  pass\nraise E('odd')\n", ["raised E: odd"]),
        ("def get_config():\n  exit(0)\n", ["my_config.py raised SystemExit: 0"]),
    ],
)
def test_a_file_that_is_no_config_says_where_it_fails(capsys, source, parts):
    told = _mistake(capsys, _train(_config_file(source)))
    for part in parts:
        assert part in told


@pytest.mark.parametrize("name", commands.commands())
@pytest.mark.parametrize(
    "value", ["~nosuchuser/x", "/dev/null/x", "y" * 5000, "/" + "z/" * 2000, "\udce9\0"]
)
def test_a_path_that_is_none_is_a_mistake_in_every_command(name, value, capsys):
    flags = {option.name for option in commands.commands()[name].options}
    for flag in {"workdir", "source", "config", "path"} & flags:
        needed = {"config": "configs/reverse.py", "source": "none", "workdir": "w"}
        if name == "generate":
            needed["examples"] = 1
        given = {x: y for x, y in needed.items() if x in flags} | {flag: value}
        arguments = [f"--{x}={y}" for x, y in given.items()]
        told = _mistake(capsys, commands.run([name, *arguments]))
        assert max(map(len, told.split())) <= 90


def test_a_file_that_is_not_text_is_no_config(capsys):
    pathlib.Path("picture.py").write_bytes(b"\x89PNG\xff\xfe")
    told = _mistake(capsys, _train("--config=picture.py"))
    assert "picture.py is not Python" in told


@pytest.mark.parametrize(
    "override, field",
    [
        ("--config.optimizer.learning_rate=nan", "config.optimizer.learning_rate"),
        ("--config.task.name=revers", "'reverse'?"),
        # Hostile values: each kind was a fault once, or could be.
        (
            f"--config.model.feed_forward.hidden_size={10**20}",
            "feed_forward.hidden_size must be",
        ),
        (f"--config.training.steps={10**20}", "from 1 to 2147483647"),
        ("--config.optimizer.learning_rate=1e400", "learning_rate must be a finite"),
        (
            "--config.model.attention.kept_heads=[",
            "kept_heads must be a list such as",
        ),
        (
            "--config.model.feed_forward.hidden_sizes=()",
            "must have an entry for each of the 1",
        ),
        (f"--config.task.name={'x' * 300}", "config.task.name must be one of"),
        ("--config.task.name=\udcff", "config.task.name must be one of"),
        (f"--config.{'x' * 300}=1", "no such field"),
        ("--config.model.\udcff=1", "no such field"),
    ],
)
def test_a_value_that_no_run_can_have_ends_before_a_folder_is_made(
    capsys, override, field
):
    assert field in _mistake(capsys, _train(_REVERSE, override))
    assert not pathlib.Path("runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--init_from=nonsense"],
        ["--init_from=a_file"],
        ["--init_from=a_folder"],
        ["--init_from=nonsense", "--workdir=a_folder/below/it"],
        ["--init_from=nonsense", "--workdir=a_folder"],
        ["--config.model.embedding.max_length=2"],
        ["--config.model.family=causal", "--config.model.output.logits=false"],
        ["--config.model.output.pool=mean"],
    ],
)
def test_a_command_that_fails_before_training_leaves_no_folder(capsys, arguments):
    pathlib.Path("a_file").write_text("")
    pathlib.Path("a_folder").mkdir()
    _mistake(capsys, _train(_REVERSE, *arguments))
    assert sorted(map(str, pathlib.Path().rglob("*"))) == ["a_file", "a_folder"]


def test_a_program_that_ends_itself_is_a_fault(trained, capsys):
    trained.error = SystemExit("the user's code says why")
    assert _train(_REVERSE) == 1
    assert "fault: SystemExit: the user's code says why" in capsys.readouterr().err


@pytest.mark.parametrize("workdir", ["taken", "taken/below"])
def test_a_workdir_that_cannot_be_made_is_refused(capsys, workdir):
    pathlib.Path("taken").write_text("")
    assert "taken" in _mistake(capsys, _train(_REVERSE, f"--workdir={workdir}"))


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["--workdir=... is missing"]),
        (["--workdir=absent"], ["absent"]),
        (["--workdir=absent", "--layers=first"], ["--layers=first", "integers"]),
        (["--workdir=absent", "--step=last"], ["--step=last"]),
        (["--workdir=absent", f"--step={10**20}"], ["--step=1000", "<= 2147483647"]),
        (["--workdir=absent", f"--layers={10**20}"], ["at most 2147483647"]),
        ([f"--workdir={'x' * 300}"], ["too long"]),
        (["--workdir=[0]"], ["There is no run in [0]"]),
        (["--workdir=a\0b"], ["NUL"]),
        (
            ["--workdir=absent", "--config.model.attention.num_heads=2"],
            ["There is no flag"],
        ),
    ],
)
def test_a_mistake_in_dump_attention_is_told_like_any_other(capsys, arguments, parts):
    told = _mistake(capsys, commands.run(["dump_attention", *arguments]))
    for part in parts:
        assert part in told
    assert not pathlib.Path("absent").exists()


def test_overrides_are_read_with_the_type_of_the_default(trained):
    status = _train(
        _REVERSE,
        "--config.model.attention.num_heads=4",
        "--config.model.attention.key_size=8",
        "--config.optimizer.learning_rate=1e-3",
        "--config.optimizer.clip_norm",
        "2",
        "--config.model.attention.with_bias=False",
        "--config.training.tensorboard",
        "--config.model.embedding.positions=none",
        "--config.model.attention.num_key_value_heads=None",
        "--config.model.attention.implementation=blockwise",
        "--override_config",
    )
    assert status == 0
    model, optimizer = trained.config.model, trained.config.optimizer
    assert (model.attention.num_heads, model.attention.key_size) == (4, 8)
    assert optimizer.learning_rate == 1e-3
    assert optimizer.clip_norm == 2.0
    assert isinstance(optimizer.clip_norm, float)
    assert model.attention.with_bias is False
    assert trained.config.training.tensorboard is True
    assert model.embedding.positions == "none"
    assert model.attention.num_key_value_heads is None
    assert model.attention.implementation == "blockwise"
    assert trained.options["override_config"]
    assert trained.workdir == pathlib.Path("runs/reverse")


def test_one_run_leaves_nothing_to_the_next(trained):
    _train(_REVERSE, "--workdir=first", "--override_config", "--config.seed=3")
    _train(_REVERSE)
    assert trained.workdir == pathlib.Path("runs/reverse")
    assert not trained.options["override_config"]
    assert trained.config.seed == 0


def test_lists_are_read_as_python_writes_them():
    config, name = runs.default_config(), "config.model.feed_forward.hidden_sizes"
    for text, sizes in (("[3, 4, 5]", (3, 4, 5)), ("6,", (6,)), ("None", None)):
        layers = ("config.model.num_layers", str(len(sizes or "1")))
        found = config_files.override(config, [(name, text), layers])
        assert found.model.feed_forward.hidden_sizes == sizes
    for wrong in ("3", "three", "(1"):
        with pytest.raises(checks.ConfigError, match="a list such as"):
            config_files.override(config, [(name, wrong)])


def test_a_field_of_several_types_is_read_as_one_of_them():
    config, name = runs.default_config(), "config.model.attention.sinks"
    for text, sinks in (("learned", "learned"), ("0.5", 0.5), ("none", None)):
        found = config_files.override(config, [(name, text)])
        assert found.model.attention.sinks == sinks
    with pytest.raises(checks.ConfigError, match="'learned' or a number, got 'often'"):
        config_files.override(config, [(name, "often")])


def test_setting_a_field_of_a_frozen_config_says_what_to_write(trained, capsys):
    source = (
        "from mha_haiku import runs\n"
        "def get_config():\n"
        "  config = runs.default_config('sort')\n"
        "  config.training.steps = 3\n"
        "  return config\n"
    )
    assert _train(_config_file(source)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 2 and "'steps'" in lines[0] and "config.replace" in lines[1]


def test_a_config_of_the_user_may_lie_anywhere(trained):
    source = (_REPOSITORY / "configs/reverse.py").read_text()
    assert _train(_config_file(source)) == 0
    assert trained.workdir == pathlib.Path("runs/my_config")


def test_a_finished_run_says_where_its_maps_are(trained, capsys):
    assert _train(_REVERSE) == 0
    out = capsys.readouterr().out
    assert "runs/reverse/summary.json" in out
    assert "runs/reverse/attention/index.html" in out


def test_an_interrupted_run_ends_at_once_and_says_how_to_get_maps(trained, capsys):
    trained.interrupted = True
    assert _train(_REVERSE) == 130
    out, told = capsys.readouterr()
    assert out == ""
    assert not hasattr(trained, "dump_options")
    assert "python -m mha_haiku dump_attention --workdir=runs/reverse" in told
    assert len(told.splitlines()) == 2


def test_a_warning_is_one_line_on_stderr(trained, capsys, monkeypatch):
    monkeypatch.setattr(
        "mha_haiku.training.runs.loop.train",
        lambda *_, **__: logging.getLogger("mha_haiku").warning("watch out"),
    )
    assert _train(_REVERSE) == 1  # there is no summary
    assert capsys.readouterr().err.splitlines()[0] == "warning: watch out"
    logging.getLogger("mha_haiku").warning("nobody listens any more")
    assert "warning:" not in capsys.readouterr().err


def test_an_interruption_outside_the_loop_is_one_line(trained, capsys):
    trained.error = KeyboardInterrupt()
    assert _train(_REVERSE) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def _interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def _raised_as_another_error():
    try:
        _interrupt()
    except KeyboardInterrupt:
        raise RuntimeError("a callback raised KeyboardInterrupt") from None


def _ignored_by_python():
    _Ended()
    time.sleep(10)


class _Ended:
    def __del__(self):
        _interrupt()


@pytest.mark.parametrize("main", [_raised_as_another_error, _ignored_by_python])
def test_an_interruption_that_is_hidden_is_still_one(capsys, main):
    before = signal.getsignal(signal.SIGINT)
    assert process.ended(main) == 130
    assert capsys.readouterr().err == "Interrupted.\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.parametrize(
    "main", ["import swallows", "atexit.register(os._exit, 7); _interrupt()"]
)
def test_nothing_changes_the_status_of_an_interrupted_process(tmp_path, main):
    """Neither an import that swallows KeyboardInterrupt, nor a crash at the end."""
    program = f"""
import atexit, os, signal, sys, time
from mha_haiku import commands
{inspect.getsource(_interrupt)}
@commands.command
def script():
    {main}
commands.main("script")
"""
    swallows = "import __main__\ntry:\n    __main__._interrupt()\nexcept BaseException:"
    (tmp_path / "swallows.py").write_text(f"{swallows}\n    pass\n")
    path = os.pathsep.join([str(_REPOSITORY), str(tmp_path)])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (130, "Interrupted.\n")


def test_a_fault_is_one_line_with_the_way_to_its_traceback(trained, capsys):
    trained.error = RuntimeError("out of\nluck")
    assert _train(_REVERSE) == 1
    told = capsys.readouterr().err
    assert told == "fault: RuntimeError: out of luck (--debug shows the traceback)\n"
    assert _train(_REVERSE, "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(trained, capsys):
    trained.error = ModuleNotFoundError("No module 'matplotlib'", name="matplotlib")
    assert _train(_REVERSE) == 1
    assert "pip install 'mha_haiku[plots]'" in capsys.readouterr().err


def test_debug_shows_the_traceback_of_a_mistake_too(capsys):
    assert _train("--config=absent.py", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_dump_attention_hands_its_flags_on(trained):
    status = commands.run(
        ["dump_attention", "--workdir=w", "--layers=0,2", "--step=7", "--tokens=4,1"]
    )
    assert status == 0
    chosen = {name: x for name, x in trained.dump_options.items() if x is not None}
    assert trained.step == 7
    assert chosen == {"own": [4, 1], "layers": [0, 2], "weights": False}
    commands.run(["dump_attention", "--workdir=w", "--layers=0,cross.1,decoder"])
    assert trained.dump_options["layers"] == [0, "cross.1", "decoder"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--text=book.txt"], "Did you mean --text_file=book.txt?"),
        (["--text_file=none.txt"], "--text_file=none.txt cannot be read: No such file"),
        (["--text_file=latin.txt"], "--text_file=latin.txt is not UTF-8 text"),
        (["--text_file=book.txt", "--text=a"], "Give --text or --text_file, not both"),
        (["--text=a", "--tokens=1,2"], "Give --text or --tokens, not both"),
        (["--examples=2", "--indices=0"], "Give --examples or --indices, not both"),
        (["--tokens=1", "--examples=2"], "Give --tokens or --examples, not both"),
        (["--text=a", "--indices=0"], "Give --text or --indices, not both"),
        (
            ["--text_file=book.txt", "--indices=0,1"],
            "Give --text_file or --indices, not both",
        ),
    ],
)
def test_what_is_shown_is_given_once_and_a_file_by_its_flag(
    trained, capsys, arguments, part
):
    pathlib.Path("book.txt").write_text("of the user")
    pathlib.Path("latin.txt").write_bytes(b"caf\xe9")
    status = commands.run(["dump_attention", "--workdir=w", *arguments])
    assert part in _mistake(capsys, status)
    right = ["--workdir=w", "--text_file=book.txt"]
    assert commands.run(["dump_attention", *right]) == 0
    assert trained.dump_options["own"] == "of the user"


@pytest.mark.parametrize("text", ["x" * 5000, "no\tfile", "~nobody/x"])
def test_a_text_that_is_no_file_is_a_text(trained, text):
    flags = ["--workdir=w", f"--text={text}"]
    assert commands.run(["dump_attention", *flags]) == 0
    assert trained.dump_options["own"] == text


def test_help_shows_every_field_with_its_default_and_comment(capsys):
    assert commands.run(["train", "--help", _REVERSE, "--config.modle.x=1"]) == 0
    out = capsys.readouterr().out
    config = config_files.load("configs/reverse.py")
    shown = re.findall(r"^  --config\.([\w.]+)=(\S*)", out, re.MULTILINE)
    values = fields.flattened(config.to_json())
    wanted = {name: str(value) for name, value in values.items()}
    assert dict(shown) == wanted
    assert len(shown) == len(wanted)
    assert re.search(
        r"--config\.model\.norm\.position=pre +.*: pre, post, both or reordered\n", out
    )
    assert re.search(r"positions=learned +.*: none, learned, sinusoidal", out)
    assert re.search(r"key_size=None +\(int\) query, key and value size", out)


def test_help_without_a_config_lists_them(capsys):
    assert commands.run(["train", "-h"]) == 0
    out = capsys.readouterr().out
    for path in config_files.available():
        assert path in out
    assert "Reverses a sequence" in out
    assert "--workdir" in out


def test_every_config_file_loads():
    assert "configs/reverse.py" in config_files.available()
    for path in config_files.available():
        config_files.load(path)
        assert config_files.title(path)
