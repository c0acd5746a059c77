"""Tests published claims, on several seeds and against a control.

Run: python -m experiments.reproduce --list

     python -m experiments.reproduce --claim=multi_query_recall

     python -m experiments.reproduce --all

     python -m experiments.reproduce --table

The first command says what there is and how long it takes. The second measures a claim
and says reproduced, partly or not, with a 90 % interval over the seeds, in the claim
and in a control in which the effect must vanish. The same command resumes where it
stopped; what is stored is not measured again, unless the claim has changed since. With
--store the results go to experiments/claims/ too; from there --table writes the table
of README.md, the paragraphs of experiments/claims/README.md and its figures; no model
is run.
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
        "seeds": (int, None, "Number of seeds, from 0; None: what each claim says."),
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
        if FLAGS.seeds is not None:
            checks.integer_in("--seeds", FLAGS.seeds, 1, 2**20)
    if FLAGS.list:
        for claim in wanted:
            print(f"{claim.name} ({claim.minutes:g} min): {claim.sentence}")
            about = f"{claim.seeds} seeds; control: {claim.control}"
            print(f"    {claim.source.paper}; {about}")
        return
    if FLAGS.table:
        outcomes = [telling.Outcome.read(claim, STORED) for claim in wanted]
        files.write(README, telling.with_table(README, outcomes))
        gallery = files.write(STORED / "README.md", telling.gallery(outcomes))
        for outcome in outcomes:
            reproducing.draw(outcome, STORED)
        print(f"Table: {README}\nParagraphs and figures: {gallery}")
        return
    shared_flags.use_compilation_cache(FLAGS.compilation_cache)
    for outcome in claims.reproduce(
        wanted,
        FLAGS.workdir,
        seeds=None if FLAGS.seeds is None else range(FLAGS.seeds),
        formats=formats,
        goes_on=FLAGS.all,
    ):
        print(f"{outcome.claim.name}\n{outcome.paragraph()}\n", flush=True)
        if FLAGS.store:
            reproducing.store(outcome, STORED)
    print(f"Results and figures: {FLAGS.workdir}")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
