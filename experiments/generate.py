"""Writes texts with a trained run: continues a prompt, or answers a source.

Run: python -m experiments.generate --workdir=runs/text_lm --prompt="The " --tokens=200

A causal model of a text takes prompts, an encoder-decoder sources. A single text is
printed as it comes. All texts are kept in generated.jsonl in the run's folder, and with
--attention their maps in attention/generated there.
"""

import functools
import sys
import time

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        **shared_flags.RUN,
        "prompt": (str, None, "Text that a causal model continues."),
        "prompts": (str, None, "File of prompts, a line each."),
        "source": (str, None, "Text that an encoder-decoder answers."),
        "sources": (str, None, "File of sources, a line each."),
        "examples": (int, None, "Number of held-out examples to answer and score."),
        "tokens": (
            int,
            None,
            "Maximum length; default: 200 after a prompt, the task's longest target "
            "after a source.",
        ),
        "samples": (int, 1, "Number of texts to sample for each prompt or source."),
        "temperature": (
            float,
            None,
            "Sampling temperature; 0 is greedy. Default: 0.8 for prompts, 0 for "
            "sources.",
        ),
        "top_k": (int, None, "Sample from this many of the likeliest tokens."),
        "top_p": (float, None, "Sample from the likeliest tokens of this probability."),
        "beam": (int, None, "Width of a beam search, instead of sampling."),
        "length_penalty": (
            float,
            None,
            "Power of the length by which a beam search divides scores; default: 0.",
        ),
        "seed": (int, 0, "Seed of the samples."),
        "attention": (bool, False, "Write the attention maps of the texts."),
        **shared_flags.COMPILATION_CACHE,
        **shared_flags.PICTURES,
    }
)
_GIVEN = ("prompt", "prompts", "source", "sources", "examples")


def main() -> None:
    kind, texts = _given()
    from mha_haiku.core.checks import ConfigError
    from mha_haiku.core.models import decoding
    from mha_haiku.subjects.studies import answering, generation
    from mha_haiku.subjects.studies.workbench import Bench
    from mha_haiku.training.runs import files

    strategy = generation.strategy(
        kind,
        temperature=FLAGS.temperature,
        top_k=FLAGS.top_k,
        top_p=FLAGS.top_p,
        beam=FLAGS.beam,
        length_penalty=FLAGS.length_penalty,
    )
    generation.check_samples(FLAGS.samples, strategy)
    if FLAGS.examples is not None and FLAGS.samples > 1:
        raise ConfigError("--samples needs --prompt or --source: leave it out.")
    formats = shared_flags.formats(FLAGS)
    shared_flags.use_compilation_cache(FLAGS.compilation_cache)
    bench = Bench.load(FLAGS.workdir, FLAGS.step)
    if FLAGS.examples is not None:
        result = answering.score(
            bench, FLAGS.examples, strategy, tokens=FLAGS.tokens, seed=FLAGS.seed
        )
        job, texts = result.job, result.texts
        with files.LineWriter(bench.folder.generated) as log:
            for text in texts:
                log.append(job.record(text))
        print(result.text(), end="\n\n")
    else:
        job = generation.job(
            bench,
            kind,
            [text for text in texts for _ in range(FLAGS.samples)],
            strategy,
            tokens=FLAGS.tokens,
            seed=FLAGS.seed,
        )
        is_alone = job.kind == "prompt" and len(job.given) == 1
        is_alone &= not isinstance(strategy, decoding.Beam)  # whose end is awaited
        with files.LineWriter(bench.folder.generated) as log:
            texts = [_write_one(job, log)] if is_alone else _write(job, log)
    print(f"Kept in: {bench.folder.generated}")
    if FLAGS.attention:
        print(f"Attention maps: {generation.write_attention(job, texts, formats)}")


def _given() -> tuple[str, list[str]]:
    """Returns what texts are written from, "prompt" or "source", and these."""
    from mha_haiku.core.checks import ConfigError

    names = [name for name in _GIVEN if getattr(FLAGS, name) is not None]
    if len(names) != 1:
        wanted = ", ".join(f"--{name}" for name in _GIVEN)
        got = " and ".join(f"--{name}" for name in names) or "none"
        raise ConfigError(f"One of {wanted} must be given, got {got}.")
    (name,) = names
    value, kind = getattr(FLAGS, name), name.removesuffix("s")
    if name == "examples":
        return "source", []
    return kind, _lines(name, value) if name.endswith("s") else [value]


def _lines(flag: str, path: str) -> list[str]:
    """Returns the lines of a file."""
    from mha_haiku.core import checks

    lines = checks.text_of(path, f"--{flag}={path}").split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise checks.ConfigError(f"--{flag}={path} is empty: it must have a line each.")
    if "" in lines:
        raise checks.ConfigError(
            f"--{flag}={path} has an empty line, {lines.index('') + 1}."
        )
    return lines


def _write(job, log) -> list:
    """Writes, prints and keeps the texts of a job; returns them."""
    from mha_haiku.subjects.studies import generation
    from mha_haiku.training.runs import progress

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


def _write_one(job, log):
    """Writes, prints and keeps a text as it comes; returns it."""
    from mha_haiku.subjects.studies import generation
    from mha_haiku.training.runs import progress

    stream, times = generation.Stream(job), [time.perf_counter()]
    parts = iter(stream)
    try:
        with progress.during("compiling"):
            first = next(parts, "")
        print(job.given[0] + first, end="", flush=True)
        times.append(time.perf_counter())
        for part in parts:
            print(part, end="", flush=True)
            times.append(time.perf_counter())
    finally:  # an interrupted text is kept as well
        text = stream.text()
        log.append(job.record(text))
        print(flush=True)
    count, begun = len(text.tokens), 1 + generation.CHUNK  # both programs are compiled
    line = f"{count:,} tokens in {times[-1] - times[0]:.1f} s"
    if begun < count < len(times):
        rate = (count - begun) / (times[count] - times[begun])
        line += f", {rate:,.0f} tokens/s after the first {begun}"
    print(f"\n{line}")
    return text


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
