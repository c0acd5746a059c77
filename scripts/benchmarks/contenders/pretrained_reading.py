"""The gguf package: reads a file and dequantizes every array of it."""

import gguf
import numpy as np

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import pretrained_models


def prepare(model: str) -> worker.Program:
    """Prepares what is measured.

    Args:
      model: A name of `pretrained_models.MODELS`, whose file is GGUF.
    """
    path = pretrained_models.MODELS[model].path

    def run():
        for tensor in gguf.GGUFReader(path).tensors:
            np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))

    return worker.Program(run)
