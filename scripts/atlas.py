"""Tries `mh.wrap` on a tiny random model of each model type of transformers.

Run: python scripts/atlas.py --results=atlas.jsonl --out=experiments/atlas.md

A type's config is shrunk by the names of its fields, inputs are made by the names of
the model's arguments, and the wrapped model is compared with the module itself. A type
is right, has no attention, is refused with a reason, or is wrong; one that torch itself
could not run this way is not tried. Types in the file of `--results` are not repeated.
"""

import collections
import concurrent.futures
import importlib
import importlib.metadata
import inspect
import json
import math
import multiprocessing
import os
import pathlib
import re
import resource
import sys
import tempfile
import textwrap
import threading
import warnings
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import tqdm

from mha_haiku import commands
from mha_haiku.core import checks

VERDICTS = ("right", "no attention", "refused", "wrong", "not tried")
TOLERANCE = 1e-4  # of the largest number
# Weights before the share of a sink is taken; rows in the order of an unsorted topk.
_OTHER_WEIGHTS = ("granite_swa", "granitemoe_swa", "informer")
_TYPES_OF_A_PROCESS = 40  # as compiled programs stay in its memory
_TEXT = """\
Tiny random models, by `python scripts/atlas.py --out=experiments/atlas.md`. *Right*:
`subject.check` finds output, maps and gradients equal to torch's, and so are the maps
that the model itself returns. *No attention*: no part is attention that has a map.
*Refused*: an error with its reason, and no number. *Not tried*: torch itself does not
run the type on such inputs here, or time or memory ran out."""
B, T, VOCABULARY, WIDTH, HEADS, SIDE, SAMPLES = 2, 7, 128, 64, 4, 32, 4000
_LOWEST, _HIGHEST, _SPECIAL = 3, 90, 127  # ids of tokens; special ones count down

# The first pattern that fits a field's whole name has its most, None if it stays. In
# lists it is the most of each item.
_SIZES = {
    ".*(loss|scale|merge|stride|std|rate|ratio|factor|kernel|type_vocab).*": None,
    ".*(max_seq_len|seq_len(gth)?|text_length|position_emb.*|positions|n_ctx)": 64,
    ".*(vocab_?size.*|num_embeddings|codebook_size|codebook_num|_vocab)": VOCABULARY,
    "num_key_value_groups|.*_groups?": 2,
    "mamba_d_ssm|.*ssm_dim": 2 * WIDTH,
    ".*(mamba|ssm).*heads": 8,
    "num_kv_shared_layers": 0,
    ".*(heads|n_head|num_head)": HEADS,
    "first_k_dense_replace|moe_layer_start_index|num_dense_layers|dense_layers": 1,
    "index_topk": 16,
    ".*(per_tok(en)?|top_?k(_experts)?)|moe_k": 2,
    ".*experts": 4,
    "(.*_|n_|num_)?(layers?|depth|blocks?|block_num)": 2,
    "depths|layers_per_block": 1,
    ".*(head_dim|head_size|dim_head|d_kv|d_head|headdim|lora_rank)": 16,
    "rotary_dim|.*nope_head_dim|.*rope_head_dim": 8,
    "(.*_)?patch(_?size|_length)s?": 8,
    "(.*_)?(image|img|crop|input|tile)_size": SIDE,
    "(.*_)?sliding_window|(attention|local)_(window|attention)": 4,
    "num_pos_feats": WIDTH // 2,
    ".*(num_frames|num_queries|query_tokens|num_latents|queries|num_points)": 8,
    "num_mel_bins|feature_size|n_mels|num_mels|mel_bins": 16,
    ".*(d_ff|(ffn|mlp|intermediate|feed_forward)_(dim|size))": 2 * WIDTH,
    ".*(size|sizes|dim|dims|d_model|embd|width|channels?|filters|features?)": WIDTH,
}
_TOKEN = re.compile(".*(token|start|end|pad|bos|eos|sep|cls|mask)_?(id|index)s?|.*_id")
# What names of fields do not tell.
_RESNET = dict(model_type="resnet", embedding_size=8, hidden_sizes=[8] * 4)
_RESNET["depths"] = [1] * 4
_ONE, _THREE = (
    dict(use_timm_backbone=False, backbone_config=_RESNET | dict(out_features=x))
    for x in (["stage4"], ["stage2", "stage3", "stage4"])
)
_THREE |= dict(encoder_in_channels=[8] * 3)
_SWIN = dict(image_size=2 * SIDE, window_size=2)
_SERIES = dict(prediction_length=4, lags_sequence=[1, 2, 3], num_time_features=1)
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys("conditional_detr dab-detr detr table-transformer".split(), _ONE),
    **dict.fromkeys("deformable_detr rt_detr rt_detr_v2 d_fine deimv2".split(), _THREE),
    **dict.fromkeys("autoformer informer time_series_transformer".split(), _SERIES),
    **dict.fromkeys("swin donut-swin maskformer-swin swinv2".split(), _SWIN),
    "layoutlmv3": dict(coordinate_size=10, shape_size=12),
    "lilt": dict(hidden_size=96),
    "mask2former": dict(feature_size=WIDTH, mask_feature_size=WIDTH),
    "bamba": dict(attn_layer_indices=[1]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    "esm": dict(vocab_size=33, mask_token_id=32),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "nemotron": dict(num_key_value_heads=2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "xmod": dict(default_language="en_XX"),
    "cvt": dict(depth=[1, 2, 3]),
    "audio-spectrogram-transformer": dict(max_length=2 * 32),
}


def shrunk(config: Any, tokens: dict[int, int]) -> Any:
    """Makes a config of the same class whose model is tiny.

    `tokens` collects the new ids of special tokens beyond the vocabulary.
    """
    kind = type(config)
    declared = {x.name: x.default for x in kind.__dataclass_fields__.values()}
    default, chosen = vars(kind()), {}
    given = {x: y for x, y in vars(config).items() if x in declared or x not in default}
    types = given.get("layer_types") or given.get("layers_block_type") or ()
    # One layer of each type, and at least two.
    kept = {x: i for i, x in reversed([*enumerate(types)])}.values()
    kept = sorted([*kept] if len(kept) > 1 else range(len(types[:2])))
    for name, value in given.items():
        is_list = isinstance(value, list | tuple)
        is_whole = is_list or isinstance(value, dict) or hasattr(value, "to_dict")
        new = _value(name, value, tokens)
        if kept and is_list and len(value) == len(types):
            new = type(value)(value[i] for i in kept)
        elif kept and value == len(types) and "layers" in name:
            new = len(kept)
        elif "key_value_heads" in name and isinstance(value, int):
            is_grouped = value not in (1, given.get("num_attention_heads"))
            new = HEADS // 2 if is_grouped else min(value, HEADS)
        # A number that the class itself derives stays derived.
        is_chosen = is_whole or declared.get(name) is not None
        if (new is not value and is_chosen) or value != default.get(name):
            chosen[name] = new
    result = kind(**chosen | _EXCEPTIONS.get(kind.model_type, {}))
    if "head_dim" in declared and vars(result).get("head_dim", 0) is None:
        result.head_dim = 16
    return result


def _value(name: str, value: Any, tokens: dict[int, int]) -> Any:
    if hasattr(value, "to_dict"):
        return shrunk(value, tokens)
    if isinstance(value, dict) and value and all(isinstance(x, str) for x in value):
        new = {key: _value(key, x, tokens) for key, x in value.items()}
        if "mrope_section" in value or ("mrope" in tokens and "rope_type" in value):
            half = int(8 * value.get("partial_rotary_factor", 1))
            new["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
        return value if new == value else new
    if isinstance(value, list | tuple) and value:
        new = type(value)(_value(name, x, tokens) for x in value)
        return value if new == value else new
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _TOKEN.fullmatch(name):
        is_low = value <= _HIGHEST
        return value if is_low else tokens.setdefault(value, _SPECIAL - len(tokens))
    most = next((x for key, x in _SIZES.items() if re.fullmatch(key, name)), None)
    if most == HEADS and 0 < value < HEADS:
        return 2 ** (value.bit_length() - 1)  # divides the width
    return value if most is None else min(value, most)


def model_class(kind: str) -> Any:
    """Finds the base model of a type, or else another model that has its config."""
    import transformers
    from transformers.models.auto import modeling_auto

    config_class = transformers.CONFIG_MAPPING[kind]
    tables = [modeling_auto.MODEL_MAPPING_NAMES, *vars(modeling_auto).values()]
    tables = [x[kind] for x in tables if isinstance(x, dict) and kind in x]
    names = [name for x in tables for name in np.atleast_1d(x).tolist()]
    for found in (getattr(transformers, str(name), None) for name in names):
        if _is_model(found, config_class):
            return found
    package = config_class.__module__.rpartition(".")[0]
    folder = pathlib.Path(importlib.import_module(package).__file__).parent
    for path in folder.glob("modeling_*.py"):
        module = importlib.import_module(f"{package}.{path.stem}")
        classes = [x for x in vars(module).values() if _is_model(x, config_class)]
        if classes:
            return min(classes, key=lambda x: len(x.__name__))
    raise LookupError("no model of transformers has this config")


def _is_model(found: Any, config_class: Any) -> bool:
    import transformers

    return (
        inspect.isclass(found)
        and issubclass(found, transformers.PreTrainedModel)
        and found.config_class in config_class.__mro__[:2]
        and "_forward_unimplemented" not in found.forward.__qualname__
    )


def make(kind: str) -> Any:
    """Makes a tiny random model of a type, with numbers that no layer hides."""
    import torch
    import transformers

    torch.manual_seed(0)
    build = model_class(kind)
    has_axes = re.search("vl|glm4v|glm_|ocr|omni|talker", kind)
    tokens = {"mrope": 0} if has_axes else {}
    config = shrunk(transformers.CONFIG_MAPPING[kind](), tokens)
    config._attn_implementation = "eager"
    module = build(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def arguments(module: Any) -> dict[str, list[np.ndarray]]:
    """Makes arguments of models by name, each in several layouts."""
    random, values = np.random.default_rng(0), list(_values(module.config))

    def find(default: int, *names: str) -> int:
        first = (x for name in names for key, x in values if key == name and x)
        found = next(first, default)
        return max(found) if isinstance(found, list | tuple) else found

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=(B, *shape)).astype(np.float32)

    def each(*shapes: tuple[int, ...]) -> list[np.ndarray]:
        return [normal(*x) for x in shapes]

    numbers = [(key, x) for key, x in values if isinstance(x, int)]
    special = {x for key, x in numbers if key.endswith(("id", "index"))}
    rows = [x for key, x in numbers if key in ("vocab_size", "text_vocab_size") and x]
    tokens = sorted({*range(_LOWEST, min(_HIGHEST, *rows, _HIGHEST))} - special)
    side = find(SIDE, "image_size", "input_size", "img_size")
    channels = find(3, "num_channels", "in_channels", "in_chans")
    patch, frames = find(8, "patch_size"), find(4, "num_frames", "frames_per_clip")
    tubes, width = find(1, "temporal_patch_size"), find(WIDTH, "hidden_size", "d_model")
    mels = find(16, "num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size")
    sound = 2 * find(32, "max_source_positions")
    grid, patches = np.array([[1, 4, 4]] * B), normal(16, channels * tubes * patch**2)
    flat = normal(16, channels, patch, patch).reshape(B * 16, channels, patch, patch)
    images = each((channels, side, side), (frames, channels, side, side))
    images += [patches.reshape(B * 16, -1), flat, patches]
    sounds = each((mels, sound), (sound, mels), (SAMPLES,), (1, SAMPLES))
    sounds += each((1, sound, mels))
    corners = np.sort(random.integers(0, 60, (B, T, 2, 2)), 2).reshape(B, T, 4)
    return {
        "input_ids": [random.choice(tokens, (B, T))],
        "pixel_values": images,
        "pixel_values_videos": images[1:2],
        "image_grid_thw": [grid],
        "input_features": sounds,
        "input_values": [*sounds[2:4], *sounds[:2], sounds[4]],
        "decoder_input_ids": [random.choice(tokens, (B, 5))],
        "bbox": [corners],
        "future_values": each((4,)),
        "future_time_features": each((4, 1)),
        "visual_feats": each((5, find(WIDTH, "visual_feat_dim"))),
        "visual_pos": each((5, 4)),
        # What follows only where it has to be there.
        "grid_thw": [grid],
        "target_sizes": [grid[:, 1:]],
        "spatial_shapes": [grid[:, 1:]],
        "merge_sizes": [np.full(B, 2)],
        "pixel_attention_mask": [np.ones((B, 16), int)],
        "input_features_mask": [np.ones((B, sound), int)],
        "hidden_states": [normal(T, width), *images[2:]],
        "inputs_embeds": each((T, width)),
        "encoder_hidden_states": each((5, find(width, "encoder_hidden_size"))),
        "query_embeds": each((8, width)),
        "qformer_input_ids": [random.choice(tokens, (B, T))],
        "attention_mask": [np.ones((B, T), int)],
        "past_values": each((7,), (64, channels), (64,)),
        "past_time_features": each((7, 1)),
        "past_observed_mask": [np.ones((B, 7), "f4"), np.ones((B, 64, channels), "f4")],
        "inputs": each((T, width)),
    }


def _values(config: Any):
    """Lists names and values of a config, then of its parts."""
    yield from vars(config).items()
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            yield from _values(part)


def run(module: Any, given: dict[str, Any], **options: Any) -> Any:
    """Runs the module in torch."""
    import torch

    if "use_cache" in inspect.signature(module.forward).parameters:
        options["use_cache"] = False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # as for the copy
        return module(**{k: torch.as_tensor(x) for k, x in given.items()}, **options)


def inputs(module: Any) -> dict[str, np.ndarray]:
    """Finds inputs that torch itself takes, of as many sides as possible."""
    known, table = inspect.signature(module.forward).parameters, arguments(module)
    required = [name for name, x in known.items() if x.default is x.empty]
    main = np.atleast_1d(module.main_input_name).tolist()
    usual = [x for x in [*table][:12] if x in known]
    sizes = [x for x in [*table][12:18] if x in known]
    choices = [usual, [*main, "decoder_input_ids"], main, ["input_ids"]]
    choices += [[*main, "encoder_hidden_states"], ["inputs_embeds"]]
    choices += [[*x, *sizes] for x in choices if sizes]
    first = None
    for layout in range(5):
        for names in choices:
            names = dict.fromkeys((*names, *required))
            names = [x for x in names if x in table and (x in known or x in main)]
            given = {x: table[x][min(layout, len(table[x]) - 1)] for x in names}
            # A layout that changes no argument was tried before.
            is_new = layout == 0 or any(layout < len(table[x]) for x in names)
            for _ in range(2 if given and is_new else 0):
                try:
                    run(module, given)
                    return given
                except Exception as caught:
                    first = first or caught
                    features = re.search(r"features:? (\d+)", str(caught))
                    if not features or "input_ids" not in given:
                        break
                    given = _with_image(module, given, int(features[1]))
    raise first or LookupError(f"no inputs are known for {', '.join(known)}")


def _with_image(module: Any, given: dict, count: int) -> dict[str, np.ndarray]:
    """Puts the places of an image in front of its text."""
    names = "image_token_id", "image_token_index", "audio_token_id", "audio_token_index"
    token = next(x for key, x in _values(module.config) if key in names)
    ids = given["input_ids"]
    row = np.full((len(ids), count // len(ids)), token)
    return given | {"input_ids": np.concatenate([row, ids], 1)}


def tried(kind: str) -> dict[str, Any]:
    """Compares a wrapped model of a type with the module itself."""
    record: dict[str, Any] = {"type": kind, "verdict": "not tried", "reason": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = make(kind)
            record["model"] = type(module).__name__
            given = inputs(module)
            record["inputs"] = {name: x.shape for name, x in given.items()}
            record["verdict"] = "refused"  # by an error from here on
            record["verdict"], record["reason"] = _verdict(module, given)
        except Exception as error:
            record["reason"] = _line(error)
    return record


def _verdict(module: Any, given: dict[str, np.ndarray]) -> tuple[str, str]:
    import mha_haiku as mh

    subject = mh.wrap(module, check=False)
    certificate = subject.check(given)
    rows = [x for x in certificate.lines if x.verdict != "equal"]
    if certificate.verdict != "equal":
        verdict = "wrong" if certificate.verdict == "differs" else "refused"
        return verdict, f"{rows[0].part}: {rows[0].note}"
    is_found = any(x.endswith("map") for x in subject.sites(given))
    maps = [x.weights() for x in subject.maps(given)] if is_found else []
    theirs = _attentions(module, given)
    if theirs and not maps:
        return "refused", "attention is not recognized"
    others = [x for x in theirs if not any(_close(y, x) for y in maps)]
    if others and module.config.model_type not in _OTHER_WEIGHTS:
        reason = f"{len(others)} of {len(theirs)} maps of torch are none of ours"
        if {*map(_form, others)}.isdisjoint(map(_form, maps)):
            return "refused", f"{reason}, and of other sizes"  # not recognized
        return "wrong", reason
    return ("right", f"{len(maps)} maps") if maps else ("no attention", "")


def _attentions(module: Any, given: dict[str, np.ndarray]) -> list[Any]:
    """Lists the weights that torch returns; some models return scores or means."""
    import torch

    try:
        output = run(module, given, output_attentions=True)
        groups = [output[x] for x in output if x.endswith("attentions")]
    except Exception:
        return []  # it has no such option
    arrays = [x for x in torch.utils._pytree.tree_leaves(groups) if np.ndim(x) == 4]
    return [x for x in arrays if ((x.sum(-1) - 1).abs() < TOLERANCE).all()]


def _form(weights: Any) -> tuple:
    """Returns what folding heads into the batch, as some models do, does not change."""
    shape = tuple(np.shape(weights))
    return math.prod(shape), shape[-2:]


def _close(actual: Any, expected: Any) -> bool:
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    if _form(actual) != _form(expected):
        return False
    actual = actual.reshape(expected.shape)
    largest = np.abs(expected).max(initial=0)
    return bool(np.abs(actual - expected).max(initial=0) <= TOLERANCE * largest)


def _line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"\S*site-packages/", "", text)[:200]


# --- many types -----------------------------------------------------------------------


def _work(pipe: Any, gigabytes: int) -> None:
    """Tries types that come through a pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    while True:
        pipe.send(tried(pipe.recv()))


class _Process(threading.local):
    """A thread's process, which tries one type after another."""

    process: Any = None

    def tried(self, kind: str, seconds: float, gigabytes: int) -> dict[str, Any]:
        """Returns the record of a type; a process that fails is replaced."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            args = theirs, gigabytes
            self.process = context.Process(target=_work, args=args, daemon=True)
            self.process.start()
            theirs.close()
            self.count, seconds = 0, seconds + 60  # to import
        self.count += 1
        record = {"type": kind, "verdict": "not tried", "reason": "it takes too long"}
        try:
            self.pipe.send(kind)
            if self.pipe.poll(seconds):
                record = self.pipe.recv()
                if self.count < _TYPES_OF_A_PROCESS:
                    return record
        except (EOFError, OSError):
            record["reason"] = "the process ended, as out of memory"
        self.process.kill()
        self.process.join()
        self.process = None
        return record


def table(found: dict[str, dict[str, Any]]) -> str:
    """Writes the types of each verdict as Markdown, by inputs or by reasons."""
    names = "transformers", "torch", "torchax", "jax"
    versions = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in names)
    groups = {x: [r for r in found.values() if r["verdict"] == x] for x in VERDICTS}
    lines = ["# Model types of transformers under `mh.wrap`", "", _TEXT, ""]
    lines += [f"{len(found)} types, with {versions}:", ""]
    lines += ["| verdict | types |", "|---|---|"]
    lines += [f"| {x} | {len(group)} |" for x, group in groups.items()]
    for verdict, group in groups.items():
        by_key = collections.defaultdict(list)
        for r in group:
            is_tried = verdict in ("right", "no attention")
            key = ", ".join(r["inputs"]) if is_tried else r["reason"][:150]
            by_key[key].append(r["type"])
        lines += ["", f"## {verdict.capitalize()}", "", *([] if group else ["None."])]
        for key, kinds in sorted(by_key.items(), key=lambda x: (-len(x[1]), x[1])):
            text = f"- {key}: {', '.join(sorted(kinds))}"
            lines += textwrap.wrap(text, 110, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def main(
    *,
    types: str = "",
    results: str = "",
    out: str = "",
    workers: int = 2,
    seconds: int = 240,
    gigabytes: int = 12,
) -> int:
    """Tries types, and writes the table.

    Args:
      types: Names of model types, with commas between; all if left out.
      results: A file of JSON lines, one for each type.
      out: The file of the table, which is written once all its types are tried.
      workers: Number of processes.
      seconds: Time limit of a type.
      gigabytes: Limit of a process's memory.
    """
    import transformers

    every, path = list(transformers.CONFIG_MAPPING), pathlib.Path(results)
    kinds = types.split(",") if types else every
    with checks.user_mistakes():
        for name in set(kinds) - {*every}:
            hint = checks.nearest(name, every)
            raise ValueError(f"--types: transformers has no model type {name!r}.{hint}")
        checks.positive_integer("--workers", workers)
    lines = path.read_text().splitlines() if results and path.exists() else []
    found = {record["type"]: record for record in map(json.loads, lines)}
    missing = [kind for kind in kinds if kind not in found]
    process = _Process()
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    with tempfile.TemporaryDirectory() as folder, pool:
        # Most time is of compiling small operations, many of which types share.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        waiting = [pool.submit(process.tried, x, seconds, gigabytes) for x in missing]
        done = concurrent.futures.as_completed(waiting)
        for each in (bar := tqdm.tqdm(done, total=len(missing), unit="type")):
            record = each.result()
            found[record["type"]] = record
            if types or record["verdict"] == "wrong":
                bar.write("{type}: {verdict}  {reason}".format(**record), sys.stdout)
            if results:
                with path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    found = {kind: found[kind] for kind in kinds}
    counts = collections.Counter(record["verdict"] for record in found.values())
    print(", ".join(f"{counts[x]} {x}" for x in VERDICTS))
    if out:
        pathlib.Path(out).write_text(table(found))
    return int(counts["wrong"] > 0)


# Takes argv; returns the exit status.
run_command = commands.program(main, __doc__)

if __name__ == "__main__":
    sys.exit(run_command(sys.argv))
