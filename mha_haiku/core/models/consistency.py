"""Checks of a model's config: fields that must fit each other."""

from collections.abc import Iterator

from mha_haiku.core import checks, modules
from mha_haiku.core.models import architecture, parts
from mha_haiku.core.models.architecture import (
    AttentionConfig,
    ModelConfig,
    OutputConfig,
)


@checks.user_mistakes()
def check(config: ModelConfig) -> None:
    """Raises `checks.ConfigError` if fields of a model do not fit each other.

    Example:
      >>> mh.models.check(config)  # nothing is wrong
      >>> mh.models.check(config.replace(decoder=dict(num_layers=2)))
      Traceback (most recent call last):
        ...
      mha_haiku.core.checks.ConfigError: config.model.decoder.num_layers must be None...
    """
    for check_of in (
        _sizes,
        _pattern,
        _positions,
        _by_layer,
        _norms,
        _output,
        _decoder,
    ):
        for mistake in check_of(config):  # only the first: later checks rely on it
            raise checks.ConfigError(f"config.model.{mistake}")


def _sizes(config: ModelConfig) -> Iterator[str]:
    section, model_size = config.attention, config.model_size
    num_heads, num_groups = section.num_heads, section.num_key_value_heads
    if not num_heads and not config.feed_forward.hidden_size:
        yield (
            "attention.num_heads or feed_forward.hidden_size must be above 0, got 0 "
            "for both."
        )
    if num_heads and section.key_size is None and model_size % num_heads:
        yield (
            f"attention.num_heads must divide model_size = {model_size} where key_size "
            f"is not given, got {num_heads}; the nearest that does is "
            f"{_nearest_divisor(model_size, num_heads)}."
        )
    if num_groups and num_heads % num_groups:
        yield (
            f"attention.num_key_value_heads must divide num_heads = {num_heads}, got "
            f"{num_groups}; the nearest that does is "
            f"{_nearest_divisor(num_heads, num_groups)}."
        )


def _nearest_divisor(number: int, size: int):
    divisors = [i for i in range(1, number + 1) if number % i == 0]
    return min(divisors, key=lambda divisor: abs(divisor - size))


def _pattern(config: ModelConfig) -> Iterator[str]:
    section = config.attention
    for name, choices in modules.CHOICES.items():
        read = dict.fromkeys(x for choice in choices.values() for x in choice.fields)
        for field in read:
            known_by = [x for x, choice in choices.items() if field in choice.fields]
            default, value = getattr(AttentionConfig(), field), getattr(section, field)
            kind = getattr(section, name)
            if kind not in known_by and value != default:
                yield (
                    f"attention.{field} is only for {name} = "
                    f"{' or '.join(known_by)}, and must be {default} with {name} = "
                    f"{kind!r}, got {value}."
                )
    scores = modules.CHOICES["score"]
    if section.normalizer == "none" and not scores[section.score].stays_small:
        small = [x for x, choice in scores.items() if choice.stays_small]
        yield (
            f"attention.normalizer = 'none' needs score = {' or '.join(small)}, whose "
            f"exponentials stay small, got {section.score!r}."
        )


def _positions(config: ModelConfig) -> Iterator[str]:
    schemes, kind = modules.POSITION_SCHEMES, config.embedding.positions
    name = f"embedding.positions = {kind!r}"
    in_attention = [x for x, y in schemes.items() if y.rotate or y.bias]
    if not config.attention.num_heads and kind in in_attention:
        others = ", ".join(x for x in schemes if x not in in_attention)
        yield (
            f"{name} works through attention, and there is none with "
            f"attention.num_heads = 0; choose one of {others}."
        )
    what, size = "model_size", config.model_size
    if schemes[kind].rotate:
        what, size = "key size", parts.key_size(config)
    if schemes[kind].has_pairs and size % 2:
        yield f"{name} needs an even {what}, got {size}."
    frequencies, pairs = config.embedding.frequencies, size // 2
    if frequencies is not None and not schemes[kind].rotate:
        rotating = " or ".join(x for x, scheme in schemes.items() if scheme.rotate)
        yield (
            f"embedding.frequencies is only for {rotating} positions, and must be None "
            f"with positions = {kind!r}."
        )
    if frequencies is not None and len(frequencies) != pairs:
        yield (
            "embedding.frequencies must have a number for each of the key_size / 2 = "
            f"{pairs} pairs of features, got {len(frequencies)}."
        )


def _by_layer(config: ModelConfig) -> Iterator[str]:
    kept, sizes = config.attention.kept_heads, config.feed_forward.hidden_sizes
    num_layers = parts.num_all_layers(config)
    for field, value, count in (
        ("attention.kept_heads", kept, len(parts.places(config))),
        ("feed_forward.hidden_sizes", sizes, num_layers),
    ):
        if value is None:
            continue
        if len(value) != count:
            of = "attention parts (encoder, decoder, cross)"
            of = "layers" if count == num_layers else of
            yield (
                f"{field} must have an entry for each of the {count} {of}, got "
                f"{len(value)}."
            )
        if config.scan_layers:
            yield (
                f"scan_layers must be False with {field}: scanned layers may differ "
                "only in the values of their parameters."
            )
    for i, heads in enumerate(kept or ()):
        name = f"attention.kept_heads[{i}]"
        for head in architecture.a_list(f"config.model.{name}", heads):
            last = config.attention.num_heads - 1
            checks.integer_in(f"config.model.{name}", head, 0, last)
        if len(set(heads)) != len(heads):
            yield f"{name} must not repeat a head, got {heads!r}."
    for i, size in enumerate(sizes or ()):
        name = f"config.model.feed_forward.hidden_sizes[{i}]"
        checks.integer_in(name, size, 1, 2**22)


def _norms(config: ModelConfig) -> Iterator[str]:
    for section in ("embedding", "output"):
        if getattr(config, section).norm and config.norm.kind == "none":
            yield f"{section}.norm must be False with norm.kind = 'none'."


def _output(config: ModelConfig) -> Iterator[str]:
    section, default = config.output, OutputConfig()
    is_set = config.family == "set_classifier"
    for field in ("pool", "tied"):
        if is_set and getattr(section, field):
            yield (
                f"output.{field} must be {getattr(default, field)} for a "
                "set_classifier, which has a logit for each element."
            )
    if is_set and not section.logits:
        yield "output.logits must be True for a set_classifier."
    for field in ("hidden", "norm", "tied"):
        value = getattr(section, field)
        if not section.logits and value:
            yield (
                f"output.{field} must be {getattr(default, field)} with logits = "
                f"False: it is part of the logits, got {value!r}."
            )


def _decoder(config: ModelConfig) -> Iterator[str]:
    if config.family != "encoder_decoder":
        if config.decoder.num_layers is not None:
            yield (
                "decoder.num_layers must be None for a model without a decoder: family "
                f"is {config.family!r}."
            )
        return
    for name, value, needed in (
        ("attention.num_heads", config.attention.num_heads, "at least 1"),
        ("output.pool", config.output.pool is None, "None"),
        ("output.logits", config.output.logits, "True"),
    ):
        if not value:
            yield f"{name} must be {needed} for an encoder_decoder."
