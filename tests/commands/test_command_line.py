"""A user's mistake costs exit status 2 and two lines; --help shows every field."""

import logging
import pathlib
import re
import types

import pytest

from mha_haiku import commands, runs
from mha_haiku.commands import config_files
from mha_haiku.core import checks, fields
from mha_haiku.subjects.subject import Subject
from tests.tiny_runs import write_untrained

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_REVERSE = "--config=configs/reverse.py"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Stands in for training; holds what it was called with."""
    from mha_haiku.subjects.verbs import dumps
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
    monkeypatch.setattr(dumps, "dump", dump)
    monkeypatch.setattr(Subject, "of_folder", load)
    monkeypatch.setattr(dumps, "write_report", lambda *_, **options: None)
    return calls


def _train(*arguments):
    return commands.run(["train", *arguments, "--compilation_cache="])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The folder of a run of one layer of two heads, not to be changed."""
    config = config_files.load("configs/reverse.py")
    config = config.replace(model=dict(attention=dict(num_heads=2)))
    return write_untrained(tmp_path_factory.mktemp("runs") / "run", config)


_TRAIN = "train --config=configs/reverse.py"
_TEXT = {
    "book.txt": "of the user",
    "null.py": "x = 1\n\0",
    "syntax.py": "def get_config(:\n",
    "nothing.py": "x = 1\n",
    "number.py": "def get_config():\n  return 3\n",
    "fails.py": "def get_config():\n  return 1 / 0\n",
    "lines.py": "raise ValueError('a\\nb\\nc\\nd')\n",
    "ends.py": "def get_config():\n  exit(0)\n",
    "sets.py": "from mha_haiku import runs\nruns.default_config().seed = 3\n",
}
_MISTAKES = [
    ("train", "--config=... is missing", "configs/reverse.py"),
    ("train --confg=configs/reverse.py", "--confg", "Did you mean '--config'?"),
    (f"{_TRAIN} --wrkdir=x", "--wrkdir", "Did you mean '--workdir'?"),
    (f"{_TRAIN} --model.num_layers=2", "'--config.model.num_layers'?"),
    ("train --confg.model.num_layers=2", "'--config.model.num_layers'?"),
    (f"{_TRAIN} stray", "'stray' belongs to no flag", "--workdir"),
    (f"{_TRAIN} --debug=perhaps", "--debug=perhaps must be true or false"),
    (f"{_TRAIN} --workdir", "Missing value for flag --workdir"),
    (f"{_TRAIN} --format=png,bmp", "formats must be one of", "pdf", "'bmp'"),
    (f"{_TRAIN} --format=", "formats must name one"),
    (f"{_TRAIN} --workdir=book.txt", "book.txt"),
    (f"{_TRAIN} --workdir=book.txt/below", "book.txt"),
    ("train --config=configs/revers.py", "revers.py'", "'configs/reverse.py'?"),
    (
        "train --config=configs/nope.py",
        "nope.py'.\nFiles in configs/: associative_recall, ",
    ),
    ("train --config=.", "there is no file '.'"),
    ("train --config=picture.py", "picture.py is not UTF-8 text"),
    ("train --config=syntax.py", "syntax.py raised SyntaxError", "line 1"),
    ("train --config=null.py", "null.py raised"),
    ("train --config=nothing.py", "no get_config()"),
    ("train --config=number.py", "RunConfig", "got int"),
    ("train --config=fails.py", "fails.py raised ZeroDivision"),
    ("train --config=lines.py", "raised ValueError: a b c d"),
    ("train --config=ends.py", "raised SystemExit: 0"),
    ("train --config=sets.py", "'seed'", "config.replace"),
    (f"{_TRAIN} --config.model.num_head=2", "'config.model.attention.num_heads'?"),
    (f"{_TRAIN} --config.steps=9", "Did you mean 'config.training.steps'?"),
    (f"{_TRAIN} --config.optimizer.lr=1", "'config.optimizer.learning_rate'?"),
    (f"{_TRAIN} --config.epochs=9", "Did you mean 'config.training.steps'?"),
    (f"{_TRAIN} --config.n_head=9", "'config.model.attention.num_heads'?"),
    (f"{_TRAIN} --config.seed.x=2", "config.seed.x"),
    (f"{_TRAIN} --config.model=2", "sets no field", "num_layers"),
    (f"{_TRAIN} --config.=", "no such field"),
    (f"{_TRAIN} --config.model.num_layers=two", "an integer", "'two'", "1"),
    (f"{_TRAIN} --config.model.num_layers=2.5", "an integer", "'2.5'"),
    (f"{_TRAIN} --config.optimizer.b1=high", "a number", "'high'", "0.9"),
    (f"{_TRAIN} --config.model.attention.qk_norm=2", "true or false", "'2'"),
    (f"{_TRAIN} --config.optimizer.learning_rate=nan", "optimizer.learning_rate"),
    (f"{_TRAIN} --config.optimizer.learning_rate=1e400", "must be a finite"),
    (f"{_TRAIN} --config.task.name=revers", "'reverse'?"),
    (f"{_TRAIN} --config.task.name={'x' * 300}", "config.task.name must be one of"),
    (f"{_TRAIN} --config.training.steps={10**20}", "from 1 to 2147483647"),
    (f"{_TRAIN} --config.model.attention.kept_heads=[", "a list such as"),
    (f"{_TRAIN} --config.{'x' * 300}=1", "no such field"),
    (f"{_TRAIN} --config.optimizer.frozen=x --workdir=new/below", "must name modules"),
    (f"{_TRAIN} --config.model.embedding.max_length=2", "max_length must be at"),
    (f"{_TRAIN} --config.model.output.pool=mean", "output.pool must be None"),
    ("dump_attention --workdir=absent", "There is no run in absent"),
    ("dump_attention --workdir=run --layers=first", "--layers=first", "integers"),
    (f"dump_attention --workdir=run --step={10**20}", "at most 2147483647"),
    ("dump_attention --workdir=run --step=7", "step 7", "there are: 3"),
    ("dump_attention --workdir=run --config.seed=2", "There is no flag"),
    ("dump_attention --workdir=run --text=book.txt", "mean --text_file=book.txt?"),
    ("dump_attention --workdir=run --text_file=none.txt", "No such file"),
    ("dump_attention --workdir=run --text_file=picture.py", "is not UTF-8 text"),
    ("dump_attention --workdir=run --text=a --tokens=1", "Give --text or --tokens"),
    ("dump_attention --workdir=run --tokens=1 --examples=2", "not both"),
    ("head_statistics --workdir=run --layers=0,2", "layers must be", "got 2"),
    ("prune_heads --workdir=run", "Give --sweep, or one of --keep and --metric"),
    ("prune_heads --workdir=run --keep=0.5 --sizes=3", "--sizes needs --sweep"),
    ("prune_heads --workdir=run --sweep --steps=3", "--steps does not fit --sweep"),
    ("prune_heads --workdir=run --sweep --sizes=0", "sizes must be an integer of at"),
    ("prune_heads --workdir=run --keep=2", "keep must be a number in [0, 1]"),
    ("prune_heads --workdir=run --keep=1 --keep_units=half", "keep_units"),
]


@pytest.mark.parametrize("mistake", _MISTAKES, ids=lambda mistake: mistake[0][:60])
def test_a_mistake_costs_status_2_and_two_lines_and_leaves_no_file(
    mistake, stored, capsys
):
    pathlib.Path("run").symlink_to(stored)
    for name, text in _TEXT.items():
        pathlib.Path(name).write_text(text)
    pathlib.Path("picture.py").write_bytes(b"\x89PNG\xff\xfe")
    before = sorted(pathlib.Path().rglob("*")), sorted(stored.rglob("*"))
    line, *parts = mistake
    assert commands.run(line.split()) == 2
    out, told = capsys.readouterr()
    lines = [x for x in told.splitlines() if not x.endswith("...")]  # "compiling ..."
    assert out == "" and 1 <= len(lines) <= 2 and "Traceback" not in told
    for part in parts:
        assert part in told
    assert (sorted(pathlib.Path().rglob("*")), sorted(stored.rglob("*"))) == before


@pytest.mark.parametrize("name", commands.commands())
@pytest.mark.parametrize("value", ["~nosuchuser/x", "/dev/null/x"])
def test_a_path_that_is_none_is_a_mistake_in_every_command(name, value, capsys):
    flags = {option.name for option in commands.commands()[name].options}
    for flag in {"workdir", "source", "config", "path"} & flags:
        needed = {"config": "configs/reverse.py", "source": "none", "workdir": "w"}
        if name == "generate":
            needed["examples"] = 1
        given = {x: y for x, y in needed.items() if x in flags} | {flag: value}
        arguments = [f"--{x}={y}" for x, y in given.items()]
        assert commands.run([name, *arguments]) == 2
        out, told = capsys.readouterr()
        lines = [x for x in told.splitlines() if not x.endswith("...")]
        assert out == "" and len(lines) <= 2
        assert max(map(len, told.split())) <= 90


def test_a_program_that_ends_itself_is_a_fault(trained, capsys):
    trained.error = SystemExit("the user's code says why")
    assert _train(_REVERSE) == 1
    assert "fault: SystemExit: the user's code says why" in capsys.readouterr().err


def test_overrides_are_read_with_the_type_of_the_default(trained):
    status = _train(
        _REVERSE,
        "--config.model.attention.num_heads=4",
        "--config.model.attention.key_size=8",
        "--config.optimizer.learning_rate=1e-3",
        "--config.optimizer.clip_norm",
        "2",
        "--config.model.attention.with_bias=False",
        "--config.devices.shard_parameters",
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
    assert trained.config.devices.shard_parameters is True
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


def test_a_config_of_the_user_may_lie_anywhere(trained):
    source = (_REPOSITORY / "configs/reverse.py").read_text()
    pathlib.Path("my_config.py").write_text(source)
    assert _train("--config=my_config.py") == 0
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


@pytest.mark.parametrize("text", ["x" * 5000, "no\tfile", "~nobody/x"])
def test_a_text_that_is_no_file_is_a_text(trained, text):
    flags = ["--workdir=w", f"--text={text}"]
    assert commands.run(["dump_attention", *flags]) == 0
    assert trained.dump_options["own"] == text
    pathlib.Path("book.txt").write_text(text)
    assert commands.run(["dump_attention", "--workdir=w", "--text_file=book.txt"]) == 0
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
    assert re.search(r"--config\.model\.norm\.position=pre +.*: pre or post\n", out)
    assert re.search(r"positions=learned +.*: none, learned, sinusoidal", out)
    assert re.search(r"key_size=None +\(int\) query, key and value size", out)


def test_help_without_a_config_lists_them(capsys):
    assert commands.run(["train", "-h"]) == 0
    out = capsys.readouterr().out
    for path in config_files.available():
        assert path in out
    assert "Reverses a sequence" in out
    assert "--workdir" in out
