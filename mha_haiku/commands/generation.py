"""The command `generate`: a text as a stream."""

import functools
import time
from typing import Any

from mha_haiku.commands.groups import Cache, Run
from mha_haiku.commands.signatures import options_of
from mha_haiku.commands.table import command
from mha_haiku.core import checks
from mha_haiku.subjects.subject import VERBS
from mha_haiku.subjects.verbs import generation
from mha_haiku.training.runs import progress


@command
@options_of(functools.partial(VERBS["generate"].function, None))
def generate(*, run: Run, prompt: str, cache: Cache, **options: Any) -> None:
    """Writes a text with a trained run: continues a prompt, or answers a source.

    Run: python -m mha_haiku generate --workdir=runs/text_lm --prompt="The "

    The text is printed as it is written.

    Args:
      prompt: Text that a causal model continues, or an encoder-decoder answers.
    """
    subject, started = run.subject(), time.perf_counter()
    with checks.user_mistakes():
        parts = generation.stream(subject, [prompt], **options)
        progress.say("compiling")
        (first,) = next(parts)  # which checks the options
    is_continued = subject.config.model.family == "causal"
    print((prompt if is_continued else "") + first, end="", flush=True)
    for (part,) in parts:
        print(part, end="", flush=True)
    print(f"\n\n{time.perf_counter() - started:.1f} s")
