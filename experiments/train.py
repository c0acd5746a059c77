"""Trains a model and writes its attention maps.

Run: python -m experiments.train --config=configs/reverse.py --config.training.steps=100

     python -m experiments.train --workdir=runs/gpt --config.data.path=book.txt

     python -m experiments.train --config=configs/classify.py --init_from=runs/text_mlm

     python -m experiments.train --config=configs/reverse.py --config.training.seeds=5

The same command on a folder with a run resumes that run. The second command trains an
imported or pruned run on; --config.optimizer.learning_rate and others set how. The
third starts a new run from the embeddings and layers of another;
--config.optimizer.frozen=embedding,encoder/layer_0 leaves some of them as they are.
The fourth trains five models together, which differ in their seeds; the folders seed_0
to seed_4 are runs like any other.
"""

import functools
import pathlib
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        "config": (
            str,
            None,
            "File with the run's config; it is Python, and is executed (required, but "
            "where --workdir holds a run, which has its own).",
        ),
        "workdir": (
            str,
            None,
            "Folder of the run; runs/<name of the config> by default.",
        ),
        "init_from": (
            str,
            None,
            "Folder of a run whose embeddings and layers this run starts from: "
            "config.init_from.",
        ),
        "override_config": (
            bool,
            False,
            "Resume a run even though its config was different.",
        ),
        **shared_flags.COMPILATION_CACHE,
        **shared_flags.PICTURES,
        **shared_flags.DISTRIBUTED,
    }
)


def main(config) -> int:
    from mha_haiku.subjects import opening
    from mha_haiku.subjects.studies import attention_dump, observers, workbench
    from mha_haiku.training.devices import cluster
    from mha_haiku.training.runs import folders, progress

    if FLAGS.init_from is not None:
        config = config.replace(init_from=FLAGS.init_from)
    formats = shared_flags.formats(FLAGS)
    shared_flags.use_compilation_cache(FLAGS.compilation_cache)
    workdir = pathlib.Path(FLAGS.workdir or f"runs/{pathlib.Path(FLAGS.config).stem}")
    summary = opening.recorded(config, workdir, override_config=FLAGS.override_config)
    places = [own.root for _, own in folders.of_runs(folders.Folder(workdir), config)]
    dump = workbench.command("dump_attention", places[0])
    if summary.interrupted:  # no maps then, which take a while
        if cluster.leave():  # only the first process prints
            print("Interrupted; the same command resumes from here.", file=sys.stderr)
            print(f"Its maps so far: {dump}", file=sys.stderr)
        return 130
    if len(places) > 1:  # no maps of each either
        if not cluster.leave():
            return 0
        for place in places:
            observers.draw(place, formats)
        print(f"Summary:        {workdir / 'summary.json'}, mean and spread")
        print(f"Attention maps: {dump}")
        for seed, why in summary.failed.items():
            print(f"Seed {seed} has failed: {why}", file=sys.stderr)
        return int(bool(summary.failed))
    maps = attention_dump.dump(workbench.Bench.load(workdir))
    if not cluster.leave():
        return 0
    progress.say("drawing")
    attention_dump.write_report(maps.parent, formats)
    for picture in observers.draw(workdir, formats):
        print(f"Picture:        {picture}")
    print(f"Summary:        {workdir / 'summary.json'}")
    print(f"Attention maps: {maps.parent / 'index.html'}")
    return 0


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
