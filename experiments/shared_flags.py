"""Flags that several scripts share, and the functions behind them.

jax and mha_haiku are imported inside functions: `--help` needs neither.
"""

import os
import pathlib
import sys

from absl import flags

REQUIRED = object()  # the default of a flag that has none
WORKDIR = {"workdir": (str, REQUIRED, "Folder of a trained run.")}
RUN = {
    **WORKDIR,
    "step": (int, None, "Step of a checkpoint; the newest if left out."),
}
LAYERS = {
    "layers": (
        "addresses",
        None,
        "Layers, as 0,2 or, where there are kinds, cross.0,decoder; default: all.",
    )
}
# For scripts that several processes can run together; see `devices.cluster.join`.
DISTRIBUTED = {
    "distributed": (bool, False, "Run with other processes, as on a cluster."),
    "coordinator": (
        str,
        None,
        "host:port of process 0; if left out, from Slurm, Open MPI or the TPU pod.",
    ),
    "num_processes": (
        int,
        None,
        "Number of processes; if left out, the cluster's.",
    ),
    "process_id": (
        int,
        None,
        "Index of this process; if left out, the cluster's.",
    ),
    "join_seconds": (int, 60, "Seconds to wait for the other processes at the start."),
}
PICTURES = {
    "format": (str, "png", "Formats of pictures, as png,svg,pdf; each a file."),
    "dark": (bool, False, "Draw pictures light on dark."),
}
ABLATION_VALUE = {
    "ablation_value": (str, "zero", "What ablated heads pass on: zero, mean, resample.")
}
COMPILATION_CACHE = {
    "compilation_cache": (
        str,
        os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
            "mha_haiku",
            "compiled",
        ),
        "Folder that keeps compiled programs for the next start; empty for none.",
    )
}


def use_compilation_cache(folder: str) -> None:
    """Makes jax store compiled programs in `folder`; "" means none."""
    if not folder:
        return
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"No compilation cache in {folder}: {error.strerror}.", file=sys.stderr)
        return
    import jax

    jax.config.update("jax_compilation_cache_dir", folder)
    # By default jax stores programs that took a second to compile; most here take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def formats(values: flags.FlagValues) -> tuple[str, ...]:
    """Returns the formats of pictures that `--format` names; `--dark` sets the style.

    Raises:
      ConfigError: If matplotlib has no such format.
    """
    from mha_haiku.showing import drawing

    if values.dark and drawing.is_possible():
        drawing.dark()
    return drawing.check_formats([word for word in values.format.split(",") if word])


def join(values: flags.FlagValues) -> None:
    """Connects to the other processes, if the script can be run by several."""
    if "distributed" not in values:
        return
    given = values.coordinator, values.num_processes, values.process_id
    if values.distributed or any(x is not None for x in given):
        from mha_haiku.training.devices import cluster

        cluster.join(*given, timeout=values.join_seconds)


def leave(values: flags.FlagValues, status: int) -> None:
    """Ends a process that failed among others, which would wait for it."""
    if "distributed" in values:
        from mha_haiku.training.devices import cluster

        cluster.end(status)
