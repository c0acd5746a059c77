"""TransformerLens on transformers' GPT-2: the same questions by its hooks."""

import functools
import os
import tempfile

import torch

from scripts.benchmarks import worker
from scripts.benchmarks.contenders import causal_models


def prepare(
    use: str, model: str, batch: int, length: int, calls: int = 1
) -> worker.Program:
    """Prepares what is measured; arguments are as in `lab_ours.prepare`.

    Args:
      use: "forward", "ablation", "resampling", "patching", or "statistics": a cache of
        all activations. Of ablations a run has one head of each layer, as all take as
        long.
    """
    torch.set_num_threads(os.cpu_count())  # as many as the others use
    size = causal_models.SIZES[model]
    network = _bridge(model)
    tokens, other = (
        torch.from_numpy(causal_models.tokens(model, batch, length, seed)).long()
        for seed in (0, 1)
    )
    run, units = {
        "forward": (functools.partial(_forward, network, tokens, calls), calls),
        "ablation": (functools.partial(_ablation, network, tokens, None), size.layers),
        "resampling": (
            functools.partial(_ablation, network, tokens, _roll),
            size.layers,
        ),
        "patching": (
            functools.partial(_patching, network, tokens, other),
            size.num_heads,
        ),
        "statistics": (functools.partial(_cache, network, tokens), 1),
    }[use]
    return worker.Program(torch.inference_mode()(run), units=units)


def _bridge(model: str):
    import tokenizers
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    network = causal_models.of_transformers(model)
    words = tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a")
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="a", **special
    )
    with tempfile.TemporaryDirectory() as folder:  # it reads its config from one
        network.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return TransformerBridge.boot_transformers(
            folder, hf_model=network, device="cpu"
        )


def _forward(network, tokens, calls):
    for _ in range(calls):
        network(tokens, return_type="loss")


def _cache(network, tokens):
    network.run_with_cache(tokens)


def _ablation(network, tokens, other):
    def change(heads, hook, head):
        del hook
        heads[:, :, head] = 0 if other is None else other(heads[:, :, head])
        return heads

    for layer in range(network.cfg.n_layers):
        hook = functools.partial(change, head=layer % network.cfg.n_heads)
        network.run_with_hooks(
            tokens,
            return_type="loss",
            fwd_hooks=[(f"blocks.{layer}.attn.hook_z", hook)],
        )


def _roll(heads):
    return heads.roll(1, 0)


def _patching(network, tokens, other):
    from transformer_lens import patching

    _, cache = network.run_with_cache(other)

    def difference(logits):
        answers = logits[:, -1]
        return (answers[:, other[:, 0]] - answers[:, tokens[:, 0]]).mean()

    patching.get_act_patch_attn_head_out_all_pos(network, tokens, cache, difference)
