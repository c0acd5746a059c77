"""Models of others at long texts, by mha_haiku and by PyTorch itself."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mha_haiku as mh
from scripts.benchmarks import worker
from scripts.benchmarks.contenders import causal_models, pretrained_models


def prepare(use: str, length: int, model: str) -> worker.Program:
    """Prepares what is measured.

    Args:
      use: "logits", "statistics" or "gates" (the gradient of importance) of a wrapped
        model; "compared_maps", "alone_logits" and so on: of a model that is wrapped in
        each round, and compared with PyTorch or not; "sdpa", "eager" or "weights" (all
        weights) by PyTorch; "page" of SmolLM2; "by_hand" (12 heads in JAX), its program
        with "blocks" or "whole", or how long either is traced, "trace_blocks" and
        "trace_whole".
      model: A name of `causal_models.SIZES`.
    """
    if use == "by_hand":
        return _program(lambda: _page_by_hand(length))._replace(warm_up=0)
    if use.endswith(("blocks", "whole")):
        return _layers(use, length)
    tokens = causal_models.tokens(model, 1, length)
    if use == "page":
        return _page(pretrained_models.tokens("smollm2", 1, length)[0])
    if use.startswith(("compared", "alone")):
        network = causal_models.of_transformers(model, length, "sdpa")
        comparison, verb = use.split("_")
        return _program(
            lambda: getattr(mh.wrap(network, check=comparison == "compared"), verb)(
                tokens
            )
        )._replace(warm_up=0)
    if use in ("sdpa", "eager", "weights"):
        return _by_torch(model, tokens, use)
    network = causal_models.of_transformers(model, length, "eager")
    subject = mh.wrap(network, metric=mh.heads.metrics.loss)
    ask = {
        "logits": lambda: subject.logits(tokens),
        "statistics": lambda: subject.statistics(tokens).numbers,
        "gates": lambda: subject.importance("gradient", tokens).mean,
    }
    return _program(ask[use])


def _program(ask: Callable[[], Any]) -> worker.Program:
    def run():
        jax.block_until_ready(ask())

    return worker.Program(run)


def _by_torch(model: str, tokens: Any, use: str) -> worker.Program:
    import torch

    torch.set_num_threads(os.cpu_count())  # as many as the others use
    attention = "sdpa" if use == "sdpa" else "eager"
    network = causal_models.of_transformers(model, tokens.shape[1], attention)
    ids = torch.from_numpy(tokens).long()

    def run():
        with torch.inference_mode():
            network(ids, use_cache=False, output_attentions=use == "weights")

    return worker.Program(run)


def _page(tokens: Any) -> worker.Program:
    import transformers

    path = pretrained_models.MODELS["smollm2"].path
    network = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, attn_implementation="eager"
    )
    subject = mh.wrap(network.eval())

    def ask():
        with tempfile.TemporaryDirectory() as folder:
            subject.maps(tokens).show().save(f"{folder}/page.html")

    return _program(ask)._replace(warm_up=0)


# --- Attention by hand


def attend(query, key, value):  # [H, T, K]
    """Ten lines, as anybody writes them."""
    positions = jnp.arange(query.shape[1])
    scores = jnp.einsum("htk,hsk->hts", query, key) / query.shape[-1] ** 0.5
    allowed = positions[:, None] >= positions[None]
    weights = jax.nn.softmax(jnp.where(allowed[None], scores, -1e30))
    return jnp.einsum("hts,hsv->htv", weights, value)


def _arrays(length: int) -> tuple:
    return tuple(jax.random.normal(jax.random.key(3), (3, 12, length, 64)))


def _page_by_hand(length: int) -> Any:
    look = mh.look(mh.blockwise(attend), ["*/map"])
    output, found = jax.jit(look)(*_arrays(length))
    (attention_map,) = found.values()
    mh.show(attention_map)._repr_html_()
    return output, attention_map.statistics(pooled=(32, 32))


def _layers(use: str, length: int) -> worker.Program:
    """Makes 12 layers, to be run or traced."""

    def whole(query, key, value):
        for _ in range(12):
            query = query + attend(query, key, value)
        return query

    function = whole if use.endswith("whole") else mh.blockwise(whole)
    arrays, calls = _arrays(length), 20
    if use.startswith("trace"):

        def ask():
            for _ in range(calls):
                jax.jit(lambda *x: function(*x)).trace(*arrays)

    else:
        compiled = jax.jit(function).lower(*arrays).compile()

        def ask():
            return [compiled(*arrays) for _ in range(calls)]

    return _program(ask)._replace(units=calls)
