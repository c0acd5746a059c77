"""`train`."""

import sys

from mha_haiku.commands.groups import Cache, Config, Pictures, Processes
from mha_haiku.commands.table import command
from mha_haiku.subjects import observers, opening, results
from mha_haiku.subjects.subject import Subject
from mha_haiku.subjects.verbs import dumping
from mha_haiku.training.devices import cluster
from mha_haiku.training.runs import SeedsSummary, folders, progress


@command
def train(
    *,
    config: Config,
    init_from: str | None = None,
    override_config: bool = False,
    pictures: Pictures,
    cache: Cache,
    processes: Processes,
) -> int:
    """Trains a model and writes its attention maps.

    Run: python -m mha_haiku train --config=configs/reverse.py
         python -m mha_haiku train --workdir=runs/gpt --config.data.path=book.txt
         python -m mha_haiku train --config=configs/sort.py --init_from=runs/reverse
         python -m mha_haiku train --config=configs/sort.py --config.training.seeds=5

    The same command on a folder with a run resumes that run. The second command trains
    an imported or pruned run further, with --config.optimizer.learning_rate and others.
    The third starts a new run from the embeddings and layers of another run;
    --config.optimizer.frozen=embedding,encoder/layer_0 freezes some of them. The fourth
    trains five models together, which differ in their seeds; the folders seed_0 to
    seed_4 are runs like any other.

    Args:
      init_from: Folder of a run whose embeddings and layers this run starts from:
        config.init_from.
      override_config: Resume a run even though its config was different.
    """
    resolved, workdir = config.value, config.folder
    if init_from is not None:
        resolved = resolved.replace(init_from=init_from)
    summary = opening.train_observed(resolved, workdir, override_config=override_config)
    places = [one.root for _, one in folders.of_runs(folders.Folder(workdir), resolved)]
    dump = results.command("dump_attention", places[0])
    if summary.interrupted:  # no maps then, which take a while
        if cluster.leave():  # only the first process prints
            print("Interrupted; the same command resumes from here.", file=sys.stderr)
            print(f"Its maps so far: {dump}", file=sys.stderr)
        return 130
    if isinstance(summary, SeedsSummary):  # no maps of each either
        if not cluster.leave():
            return 0
        for place in places:
            observers.draw(place, pictures.format)
        print(f"Summary:        {workdir / 'summary.json'}, mean and spread")
        print(f"Attention maps: {dump}")
        for seed, why in summary.failed.items():
            print(f"Seed {seed} has failed: {why}", file=sys.stderr)
        return int(bool(summary.failed))
    maps = dumping.dump(Subject.of_folder(workdir))
    if not cluster.leave():
        return 0
    progress.say("drawing")
    dumping.write_report(maps.parent, pictures.format)
    for picture in observers.draw(workdir, pictures.format):
        print(f"Picture:        {picture}")
    print(f"Summary:        {workdir / 'summary.json'}")
    print(f"Attention maps: {maps.parent / 'index.html'}")
    return 0
