"""PyTorch: the same models by transformers, with its fused attention or eager."""

import os

import torch

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import pretrained_models


def prepare(
    model: str,
    batch: int,
    length: int,
    size: int,
    attention: str = "sdpa",
) -> worker.Program:
    """Returns what is measured; arguments are as in `pretrained_ours.prepare`.

    Args:
      attention: "sdpa", or "eager", which can return weights.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(os.cpu_count())  # as many as the others use
    path = pretrained_models.MODELS[model].path
    options = {"attn_implementation": attention, "dtype": torch.float32}
    if path.is_dir():
        network = transformers.AutoModel.from_pretrained(path, **options)
    else:  # with random weights, as what they are takes no time
        config = transformers.AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name
        )
        network = transformers.AutoModelForCausalLM.from_config(config, **options)
    network.eval()
    tokens = torch.from_numpy(pretrained_models.tokens(model, batch, length)).long()

    def run():
        with torch.inference_mode():
            for _ in range(size):
                if path.is_dir():
                    network(tokens)
                else:
                    network(tokens, use_cache=False)

    return worker.Program(run, units=size)
