"""Tests published claims, on several seeds and against a control.

Run: python -m experiments.reproduce --list

     python -m experiments.reproduce --claim=multi_query_recall

     python -m experiments.reproduce --all

     python -m experiments.reproduce --table

The first command says what there is and how long it takes. The second measures a claim
and says reproduced, partly, not reproduced or inconclusive, with a 90 % interval over
the seeds, in the claim and in a control in which the effect must vanish. The same
command resumes where it stopped; what is stored is not measured again, unless the claim
has changed since. --seeds=200-202 takes other seeds; --pilot measures the claim alone
and says how many seeds the verdict takes. With --store the results go to
experiments/claims/ too; from there --table writes the tables of README.md and
experiments/claims/README.md, a page and a figure for each claim; no model is run.
"""

import functools
import pathlib
import sys

from experiments import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        "claim": (str, "", "Claims, by their names with commas between."),
        "all": (bool, False, "All claims; faults of one do not stop the others."),
        "list": (bool, False, "Print the claims, and end."),
        "table": (bool, False, "Write README.md's table from the stored results."),
        "seeds": (str, "", "First and last seed, 200-202; '': what each claim says."),
        "pilot": (bool, False, "Measure the claim alone, on seeds 0-2 or --seeds."),
        "workdir": (str, "runs/claims", "Folder of results, figures and runs."),
        "store": (bool, False, "Keep results and figures in experiments/claims/ too."),
        **shared_flags.COMPILATION_CACHE,
        **shared_flags.PICTURES,
    }
)
STORED = pathlib.Path(__file__).resolve().parent / "claims"
README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def main() -> None:
    chosen = [bool(FLAGS.claim), FLAGS.all, FLAGS.list, FLAGS.table]
    if sum(chosen) != 1:
        command_line.require("claim", None, "Or one of --all, --list and --table.")
    from experiments import claims
    from experiments.claims import reproducing, telling
    from mha_haiku.core import checks
    from mha_haiku.training.runs import files

    formats = shared_flags.formats(FLAGS)
    with checks.user_mistakes():
        names = FLAGS.claim.split(",") if FLAGS.claim else claims.names()
        wanted = [claims.load(name.strip()) for name in names]
        seeds = _seeds(FLAGS.seeds)
    if FLAGS.list:
        for claim in wanted:
            minutes = telling.Outcome.read(claim, STORED).seconds / 60
            print(f"{claim.name} (took {minutes:.0f} min): {claim.sentence}")
            about = f"{claim.seeds} seeds; control: {claim.control}"
            print(f"    {claim.source.paper}; {about}")
        return
    if FLAGS.table:
        outcomes = [telling.Outcome.read(claim, STORED) for claim in wanted]
        files.write(README, telling.with_table(README, outcomes))
        gallery = files.write(STORED / "README.md", telling.gallery(outcomes))
        for outcome in outcomes:
            reproducing.draw(outcome, STORED)
            reproducing.page(outcome, STORED)
        print(f"Tables: {README}\n{gallery}\nPages and figures: {STORED}")
        return
    shared_flags.use_compilation_cache(FLAGS.compilation_cache)
    for outcome in claims.reproduce(
        wanted,
        FLAGS.workdir,
        seeds=seeds,
        is_pilot=FLAGS.pilot,
        formats=formats,
        goes_on=FLAGS.all,
    ):
        told = outcome.pilot if FLAGS.pilot else outcome.result()
        print(f"{outcome.claim.name}\n{told}\n", flush=True)
        if FLAGS.store:
            reproducing.store(outcome.claim, pathlib.Path(FLAGS.workdir), STORED)
    print(f"Results and figures: {FLAGS.workdir}")


def _seeds(text: str) -> range | None:
    """Returns the seeds from the first to the last, of "200-202"."""
    if not text:
        return None
    from mha_haiku.core import checks

    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise checks.ConfigError(
            f"--seeds must be the first and the last seed, as 200-202, got {text}"
        )
    return range(int(first), int(last) + 1)


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
