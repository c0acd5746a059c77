"""Checks of a model's config: of fields that must go together."""

from mha_haiku.core import checks, modules
from mha_haiku.core.models import architecture, parts
from mha_haiku.core.models.architecture import (
    AttentionConfig,
    ModelConfig,
    OutputConfig,
)


@checks.user_mistakes()
def check(config: ModelConfig) -> None:
    """Raises `checks.ConfigError` where fields of a model do not go together."""
    section, model_size = config.attention, config.model_size
    num_heads, num_groups = section.num_heads, section.num_key_value_heads
    if not num_heads and not config.feed_forward.hidden_size:
        raise checks.ConfigError(
            "config.model.attention.num_heads or feed_forward.hidden_size must be "
            "above 0, got 0 for both."
        )
    if num_heads and section.key_size is None and model_size % num_heads:
        raise checks.ConfigError(
            f"config.model.attention.num_heads must divide model_size = {model_size} "
            f"where key_size is not given, got {num_heads}; the nearest that does is "
            f"{_nearest_divisor(model_size, num_heads)}."
        )
    if num_groups and num_heads % num_groups:
        raise checks.ConfigError(
            "config.model.attention.num_key_value_heads must divide num_heads = "
            f"{num_heads}, got {num_groups}; the nearest that does is "
            f"{_nearest_divisor(num_heads, num_groups)}."
        )
    _check_pattern(section)
    _check_positions(config)
    _check_by_layer(config)
    _check_frequencies(config)
    _check_parts(config)
    _check_output(config)
    _check_decoder(config)


def _check_pattern(section) -> None:
    name = "config.model.attention"
    for chosen, choices in modules.CHOICES.items():
        read = dict.fromkeys(x for choice in choices.values() for x in choice.fields)
        for field in read:
            known_by = [x for x, choice in choices.items() if field in choice.fields]
            default, value = getattr(AttentionConfig(), field), getattr(section, field)
            kind = getattr(section, chosen)
            if kind not in known_by and value != default:
                raise checks.ConfigError(
                    f"{name}.{field} is only for {chosen} = {' or '.join(known_by)}, "
                    f"and must be {default} with {chosen} = {kind!r}, got {value}."
                )
    scores = modules.CHOICES["score"]
    if section.normalizer == "none" and not scores[section.score].stays_small:
        small = [x for x, choice in scores.items() if choice.stays_small]
        raise checks.ConfigError(
            f"{name}.normalizer = 'none' needs score = {' or '.join(small)}, whose "
            f"exponentials stay small, got {section.score!r}."
        )


def _check_positions(config) -> None:
    schemes, kind = modules.POSITION_SCHEMES, config.embedding.positions
    name = f"config.model.embedding.positions = {kind!r}"
    in_attention = [x for x, each in schemes.items() if each.rotate or each.bias]
    if not config.attention.num_heads and kind in in_attention:
        others = ", ".join(x for x in schemes if x not in in_attention)
        raise checks.ConfigError(
            f"{name} works through attention, of which there is none with "
            f"attention.num_heads = 0; choose one of {others}."
        )
    what, size = "model_size", config.model_size
    if schemes[kind].rotate:
        what, size = "key size", parts.key_size(config)
    if schemes[kind].has_pairs and size % 2:
        raise checks.ConfigError(f"{name} needs an even {what}, got {size}.")


def _check_by_layer(config) -> None:
    kept, sizes = config.attention.kept_heads, config.feed_forward.hidden_sizes
    window, turns = config.attention.window, config.embedding.frequencies
    for field, given, is_alike in (
        ("attention.kept_heads", kept, False),
        ("feed_forward.hidden_sizes", sizes, False),
        ("attention.window", window, len(set(parts.windows(config))) == 1),
        ("embedding.frequencies", turns, len(set(parts.frequencies(config))) == 1),
    ):
        if not isinstance(given, tuple) or (
            given is turns and not any(isinstance(row, tuple) for row in given)
        ):
            continue
        count, of = parts.num_all_layers(config), "layers"
        if given is kept and config.family == "encoder_decoder":
            count = len(parts.places(config))
            of = "attention parts (encoder, decoder, cross)"
        if len(given) != count:
            raise checks.ConfigError(
                f"config.model.{field} must have an entry for each of the {count} {of},"
                f" got {len(given)}."
            )
        if config.scan_layers and not is_alike:
            raise checks.ConfigError(
                f"config.model.scan_layers must be False with {field}: scanned layers "
                "must be alike in all but the values of their parameters."
            )
    for i, heads in enumerate(kept or ()):
        name = f"config.model.attention.kept_heads[{i}]"
        for head in architecture.a_list(name, heads):
            checks.integer_in(name, head, 0, config.attention.num_heads - 1)
        if len(set(heads)) != len(heads):
            raise checks.ConfigError(f"{name} must not repeat a head, got {heads!r}.")
    for i, size in enumerate(sizes or ()):
        name = f"config.model.feed_forward.hidden_sizes[{i}]"
        checks.integer_in(name, size, 1, 2**22)


def _check_frequencies(config) -> None:
    name, kind = "config.model.embedding.frequencies", config.embedding.positions
    if config.embedding.frequencies is None:
        return
    schemes = modules.POSITION_SCHEMES
    if not schemes[kind].rotate:
        rotating = " or ".join(x for x, each in schemes.items() if each.rotate)
        raise checks.ConfigError(
            f"{name} is only for {rotating} positions, and must be None with positions "
            f"= {kind!r}."
        )
    pairs = parts.key_size(config) // 2
    for i, each in enumerate(parts.frequencies(config)):
        if len(each) != pairs:
            raise checks.ConfigError(
                f"{name} must have a number for each of the key_size / 2 = {pairs} "
                f"pairs of features, got {len(each)} for layer {i}."
            )


def _check_parts(config) -> None:
    has_residuals = config.attention.residual and config.feed_forward.residual
    if config.feed_forward.parallel and not has_residuals:
        raise checks.ConfigError(
            "config.model.feed_forward.parallel needs attention.residual = True and "
            "feed_forward.residual = True: both parts are added to what they read."
        )
    places = architecture.NORM_PLACES
    if config.feed_forward.parallel and places[config.norm.position].end:
        known = ", ".join(x for x, place in places.items() if not place.end)
        raise checks.ConfigError(
            "config.model.feed_forward.parallel needs norm.position to be one of "
            f"{known}, got {config.norm.position!r}."
        )
    own = config.attention
    if own.differential:
        _check_differential(own)
    shared = parts.shared_by_heads(config)
    if own.kept_heads is not None and shared:
        raise checks.ConfigError(
            f"config.model.attention.kept_heads must be None with {shared}."
        )
    for section in ("embedding", "output"):
        if getattr(config, section).norm and config.norm.kind == "none":
            raise checks.ConfigError(
                f"config.model.{section}.norm must be False with norm.kind = 'none'."
            )


def _check_output(config) -> None:
    output, name = config.output, "config.model.output"
    default = OutputConfig()
    is_set = config.family == "set_classifier"
    for field in ("pool", "tied"):
        if is_set and getattr(output, field):
            raise checks.ConfigError(
                f"{name}.{field} must be {getattr(default, field)} for a "
                "set_classifier, which has a logit for each element."
            )
    if is_set and not output.logits:
        raise checks.ConfigError(f"{name}.logits must be True for a set_classifier.")
    for field in ("hidden", "norm", "tied", "soft_cap"):
        value = getattr(output, field)
        if not output.logits and value:
            raise checks.ConfigError(
                f"{name}.{field} must be {getattr(default, field)} with logits "
                f"= False: it is part of the logits, got {value!r}."
            )


def _check_decoder(config) -> None:
    if config.family != "encoder_decoder":
        if config.decoder.num_layers is not None:
            raise checks.ConfigError(
                "config.model.decoder.num_layers must be None for a model without a "
                f"decoder: family is {config.family!r}."
            )
        return
    for name, value, wanted in (
        ("attention.num_heads", config.attention.num_heads, "at least 1"),
        ("feed_forward.parallel", not config.feed_forward.parallel, "False"),
        ("output.pool", config.output.pool is None, "None"),
        ("output.logits", config.output.logits, "True"),
    ):
        if not value:
            raise checks.ConfigError(
                f"config.model.{name} must be {wanted} for an encoder_decoder."
            )


def _nearest_divisor(number, wanted):
    divisors = [i for i in range(1, number + 1) if number % i == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))


def _check_differential(own) -> None:
    name = "config.model.attention.differential"
    if own.num_heads % 2:
        raise checks.ConfigError(
            f"{name} needs an even num_heads, two maps a head, got {own.num_heads}."
        )
    if own.num_key_value_heads not in (None, own.num_heads):
        raise checks.ConfigError(
            f"{name} needs num_key_value_heads = None, as two maps share their values, "
            f"got {own.num_key_value_heads}."
        )
    if own.gate == "channel":
        raise checks.ConfigError(f"{name} needs gate = 'none' or 'head'.")
