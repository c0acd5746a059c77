"""Tokens, positions and the loss of a PyTorch module, read from it and its config."""

from typing import Any

_MOST_OFFSET = 2  # rows of a table of positions in front of the first one's


def predicts_next(module: Any) -> bool:
    """Checks whether a module without a separate encoder predicts the next token.

    In transformers a model's class names its loss; classes without a loss of their own
    use the causal one, except models for pretraining. Decoders taken out of an
    encoder-decoder get labels that are already shifted. Any other module is assumed to
    predict the next token, like a function.
    """
    kind, of_model = getattr(module, "loss_type", None), getattr(module, "config", None)
    is_cut = getattr(type(of_model), "is_encoder_decoder", False) is True
    is_next = kind in (None, "ForCausalLM", "ForConditionalGeneration")
    return is_next and not is_cut and not type(module).__name__.endswith("PreTraining")


def end_tokens(config: Any) -> tuple[int, ...]:
    """Finds the tokens that end a text in a config of transformers."""
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)


def image_tokens(config: Any) -> tuple[int, ...]:
    """Finds the token in whose places there are pictures, in a config."""
    token = getattr(config, "image_token_id", None)
    return (token,) if isinstance(token, int) else ()


def num_tokens(module: Any) -> int | None:
    """Counts the rows of a model's table of tokens; None if it has none."""
    return getattr(_embedding(module), "num_embeddings", None)


def max_length(module: Any) -> int | None:
    """Counts the positions of a model's table of positions; None if it has none.

    Rotary and relative positions have no end, whatever the config says.
    """
    most = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    of_tokens = getattr(_embedding(module), "weight", None)
    for name, part in module.named_modules():
        rows = getattr(part, "num_embeddings", None)
        is_relative = "rel" in name.rpartition(".")[2]
        if rows is None or part.weight is of_tokens or is_relative:
            continue
        before = part.padding_idx
        # Some tables count from the row after the padding, others have extra rows.
        if before is not None and rows == most:
            return most - before - 1
        if most <= rows <= most + _MOST_OFFSET:
            return most
    # Sines of positions, as in GPT-J.
    is_table = any(x.ndim == 2 and len(x) == most for x in module.buffers())
    return most if is_table else None


def _embedding(module: Any) -> Any:
    """Finds a model's table of tokens; None if it has none."""
    try:
        table = module.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # of modules without such a table
        return None
    return table if hasattr(table, "num_embeddings") else None
