"""The modules of the wheel; everything else about the distribution is in setup.cfg.

`python -m mha_haiku train --config=configs/reverse.py` works without a checkout, so the
wheel contains scripts and configs. They are installed inside of mha_haiku: as packages
of their own they would clash with the `experiments` and `configs` of other projects.
"""

import pathlib

import setuptools

# Claims are measured, and their results stored, in a checkout.
SCRIPTS = [
    path.stem
    for path in sorted(pathlib.Path(__file__).parent.glob("experiments/*.py"))
    if path.stem != "reproduce"
]
setuptools.setup(
    packages=[
        *setuptools.find_packages(include=["mha_haiku*"]),
        "mha_haiku.configs",
        "mha_haiku.configs.papers",
    ],
    py_modules=[f"mha_haiku.experiments.{name}" for name in SCRIPTS],
    package_dir={
        "mha_haiku.configs": "configs",
        "mha_haiku.experiments": "experiments",
    },
)
