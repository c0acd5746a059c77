"""The command `generate`: texts as a stream or in batches, and their scores."""

import functools
import time
from collections.abc import Sequence
from typing import Any

from mha_haiku.commands.groups import Cache, Pictures, Run
from mha_haiku.commands.signatures import options_of
from mha_haiku.commands.table import command
from mha_haiku.core import checks
from mha_haiku.core.checks import ConfigError
from mha_haiku.core.models import decoding
from mha_haiku.subjects.verbs import answering, dumping, generation
from mha_haiku.training.runs import files, folders, progress

_MOST_SHOWN = 64  # texts with maps


@command
@options_of(functools.partial(generation.strategy, "prompt"))
def generate(
    *,
    run: Run,
    prompt: str | None = None,
    prompts: str | None = None,
    source: str | None = None,
    sources: str | None = None,
    examples: int | None = None,
    tokens: int | None = None,
    samples: int = 1,
    seed: int = 0,
    attention: bool = False,
    pictures: Pictures,
    cache: Cache,
    **options: Any,
) -> None:
    """Writes texts with a trained run: continues a prompt, or answers a source.

    Run: python -m mha_haiku generate --workdir=runs/text_lm --prompt="The "

    A causal model takes prompts, an encoder-decoder takes sources. A single text is
    printed as a stream. All texts are stored in generated.jsonl in the run's folder,
    and with --attention their maps in attention/generated there.

    Args:
      prompt: Text that a causal model continues.
      prompts: File with one prompt per line.
      source: Text that an encoder-decoder answers.
      sources: File with one source per line.
      examples: Number of held-out examples to answer and score.
      tokens: Maximum length; default: 200 after a prompt, the task's longest target
        after a source.
      samples: Number of texts to sample for each prompt or source.
      seed: Seed of the samples.
      attention: Write the attention maps of the texts.
    """
    kind, texts = _given(
        prompt=prompt,
        prompts=prompts,
        source=source,
        sources=sources,
        examples=examples,
    )
    strategy = generation.strategy(kind, **options)
    with checks.user_mistakes():
        checks.positive_integer("samples", samples)
    if samples > 1 and not isinstance(strategy, decoding.Sampled):
        raise ConfigError(
            f"samples must be 1 without drawing, as all would be the same, got "
            f"{samples}.\nA temperature above 0, and no beam, draws tokens."
        )
    if examples is not None and samples > 1:
        raise ConfigError("--samples needs --prompt or --source: leave it out.")
    subject = run.subject()
    folder = folders.Folder(checks.as_path(run.workdir))
    kept, drawn = folder.generated, folder.attention / "generated"
    for each in (drawn, folder.root) if attention else (folder.root,):
        files.check_writable("workdir", each)
    if examples is not None:
        result = answering.score(subject, examples, strategy, tokens=tokens, seed=seed)
        job, texts = result.job, result.texts
        print(result.text(), end="\n\n")
        with files.LineWriter(kept) as log:
            for text in texts:
                log.append(job.record(text))
    else:
        repeated = [text for text in texts for _ in range(samples)]
        job = generation.job(
            subject, kind, repeated, strategy, tokens=tokens, seed=seed
        )
        is_alone = job.kind == "prompt" and len(job.given) == 1
        is_alone &= not isinstance(strategy, decoding.Beam)  # whose end is awaited
        with files.LineWriter(kept) as log:
            texts = [_write_one(job, log)] if is_alone else _write(job, log)
    print(f"Kept in: {kept}")
    if attention:
        shown = generation.example(job, texts[:_MOST_SHOWN])
        maps = dumping.dump(job.subject, own=shown, out=drawn)
        page = dumping.write_report(maps.parent, pictures.format)[-1]
        print(f"Attention maps: {page}")


def _given(**flags: str | int | None) -> tuple[str, Sequence[str]]:
    """Returns the kind of the inputs, "prompt" or "source", and the inputs."""
    names = [name for name, value in flags.items() if value is not None]
    if len(names) != 1:
        wanted = ", ".join(f"--{name}" for name in flags)
        got = " and ".join(f"--{name}" for name in names) or "none"
        raise ConfigError(f"One of {wanted} must be given, got {got}.")
    (name,) = names
    value, kind = str(flags[name]), name.removesuffix("s")
    if name == "examples":
        return "source", []
    return kind, _lines(name, value) if name.endswith("s") else [value]


def _lines(flag: str, path: str) -> list[str]:
    """Returns the lines of a file."""
    lines = checks.text_of(path, f"--{flag}={path}").split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise ConfigError(f"--{flag}={path} is empty: it must have a text per line.")
    if "" in lines:
        raise ConfigError(f"--{flag}={path} has an empty line, {lines.index('') + 1}.")
    return lines


def _write(job: generation.Job, log: files.LineWriter) -> list:
    """Writes, prints and stores the texts of a job; returns them."""
    texts, times = [], [time.perf_counter()]
    for text in generation.write(job, name="texts"):
        times.append(time.perf_counter())
        log.append(job.record(text))
        texts.append(text)
        if job.kind == "prompt":
            line = f"--- {len(texts)} of {len(job.given)}\n{text.given}{text.text}"
        else:
            line = f"{text.given} -> {text.text}"
        progress.tell(line)
    counts = [len(text.tokens) for text in texts]
    print(f"\n{sum(counts):,} tokens in {times[-1] - times[0]:.1f} s", end="")
    first = generation.BATCH  # these were written together, and compiled
    if len(texts) > first:
        rate = sum(counts[first:]) / (times[-1] - times[first])
        print(f", {rate:,.0f} tokens/s after the first {first} texts", end="")
    print()
    return texts


def _write_one(job: generation.Job, log: files.LineWriter) -> generation.Text:
    """Writes, prints and stores a text as a stream; returns it."""
    tokens, times = [], [time.perf_counter()]
    parts = generation.stream(job, tokens)
    try:
        with progress.during("compiling"):
            first = next(parts, "")
        print(job.given[0] + first, end="", flush=True)
        times.append(time.perf_counter())
        for part in parts:
            print(part, end="", flush=True)
            times.append(time.perf_counter())
    finally:  # an interrupted text is kept as well
        text = generation.text_of(job, 0, tokens)
        log.append(job.record(text))
        print(flush=True)
    count, begun = len(text.tokens), 1 + generation.CHUNK  # both programs are compiled
    line = f"{count:,} tokens in {times[-1] - times[0]:.1f} s"
    if begun < count < len(times):
        rate = (count - begun) / (times[count] - times[begun])
        line += f", {rate:,.0f} tokens/s after the first {begun}"
    print(f"\n{line}")
    return text
