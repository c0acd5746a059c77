"""A run on disk: its folder, config, lock, log, checkpoints and training loop.

    config.json      the resolved config, versions, git commit, devices
    tokenizer.json   for tasks over text; data.npz for arrays from Python
    metrics.jsonl    a line per report; locked by the process that trains
    checkpoints/     <step>/arrays.safetensors, manifest.json: the newest two, the best
    summary.json     the final metrics, and how the run ended

Killed anywhere, a run resumes bit for bit. So no parameter depends on the clock, each
file is written whole or not at all (`files`), and what a resumed run needs is a field
of `train_step.TrainState`. Of several processes only the first touches the folder, in
`cluster.first_does` and in the loop's `_Record`. A file is JSON, or arrays whose names,
shapes and dtypes are known before. Paths of your data in config.json are absolute. A
field of the config is declared next to the code that reads it (`core.fields`).
"""

from mha_haiku.training.runs.configuration import RunConfig, default_config
from mha_haiku.training.runs.folders import Run, load_run
from mha_haiku.training.runs.loop import Observer, Summary, train
from mha_haiku.training.runs.trainers import NonFiniteLossError

load = load_run

__all__ = [
    "NonFiniteLossError",
    "Observer",
    "Run",
    "RunConfig",
    "Summary",
    "default_config",
    "load",
    "load_run",
    "train",
]
