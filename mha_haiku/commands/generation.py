"""The command `generate`: a text as a stream."""

import time

from mha_haiku.commands.groups import Cache, Run
from mha_haiku.commands.table import command
from mha_haiku.core import checks
from mha_haiku.subjects.verbs import generation
from mha_haiku.training.runs import progress


@command
def generate(
    *,
    run: Run,
    prompt: str,
    tokens: int | None = None,
    seed: int = 0,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    cache: Cache,
) -> None:
    """Writes a text with a trained run: continues a prompt, or answers a source.

    Run: python -m mha_haiku generate --workdir=runs/text_lm --prompt="The "

    The text is printed as it is written.

    Args:
      prompt: Text that a causal model continues, or an encoder-decoder answers.
      tokens: Maximum length; default: 200 after a prompt, the task's longest target
        after a source.
      seed: Seed of the samples.
      temperature: Sampling temperature; 0 takes the likeliest token. Default: 0.8 for
        prompts, 0 for sources.
      top_k: Sample from this many of the likeliest tokens.
      top_p: Sample from the likeliest tokens of this probability.
    """
    subject, started = run.subject(), time.perf_counter()
    with checks.user_mistakes():
        parts = generation.stream(
            subject,
            [prompt],
            tokens=tokens,
            seed=seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        progress.say("compiling")
        (first,) = next(parts)  # which checks the options
    is_continued = subject.config.model.family == "causal"
    print((prompt if is_continued else "") + first, end="", flush=True)
    for (part,) in parts:
        print(part, end="", flush=True)
    print(f"\n\n{time.perf_counter() - started:.1f} s")
