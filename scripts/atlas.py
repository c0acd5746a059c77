"""Tries `mh.wrap` on a tiny random model of each model type of transformers.

Run: python scripts/atlas.py --results=atlas.jsonl --out=experiments/atlas.md

A type's config is shrunk by the names of its fields, inputs are made by the names of
the model's arguments, and the wrapped model is compared with the module itself. A type
is right, has no attention, is refused with a reason, or is wrong; one that torch itself
could not run this way is not tried. Types in the file of `--results` are not repeated.
"""

import collections
import importlib
import importlib.metadata
import inspect
import json
import math
import multiprocessing
import pathlib
import re
import resource
import sys
import textwrap
import time
import warnings
from multiprocessing import connection
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import tqdm

from mha_haiku import commands
from mha_haiku.core import checks

VERDICTS = ("right", "no attention", "refused", "wrong", "not tried")
TOLERANCE = 1e-4  # of the largest number
_TYPES_OF_A_PROCESS = 40  # as compiled programs stay in its memory
_TEXT = [
    "Tiny random models, by `python scripts/atlas.py --out=experiments/atlas.md`. Right: in the same forward pass the output, and each",
    "attention map that the model itself returns, equal torch's to 1e-4. No attention: nothing in the model is attention that has a map.",
    "Refused: an error says why, and no number is shown. Not tried: torch itself does not run the type on such inputs here.",
]
B, T, VOCABULARY, WIDTH, HEADS, SIDE, SAMPLES = 2, 7, 128, 64, 4, 32, 4000
_LOWEST, _HIGHEST = 3, 90  # of tokens that are no special ones

# The first pattern that fits a field's whole name has its most, None if it stays. In
# lists it is the most of each item.
_SIZES = {
    ".*(loss|cost|coef|scale|merge|stride|std|cond|rate|ratio|factor|bias|type_vocab)"
    ".*": None,
    ".*(max_seq_len|seq_length|seq_len|context_length|position_emb.*|positions|n_ctx)"
    "|max_length": 64,
    ".*(vocab_?size|num_embeddings|codebook_size|codebook_num)": VOCABULARY,
    "num_key_value_groups|.*_groups?": 2,
    ".*(mamba|ssm).*heads": 8,
    ".*(heads?|n_head)": HEADS,
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
    "(.*_)?sliding_window|(attention|local)_(window|attention)|.*window_size.*": 4,
    ".*(num_frames|num_queries|query_tokens|num_latents|queries|num_points)": 8,
    "num_mel_bins|feature_size|n_mels|num_mels|mel_bins": 16,
    ".*(d_ff|(ffn|mlp|intermediate|feed_forward)_(dim|size))": 2 * WIDTH,
    ".*(size|sizes|dim|dims|d_model|embd|width|channels?|filters|features?)": WIDTH,
}
_TOKEN = re.compile(
    ".*(token|start|end|pad|bos|eos|sep|cls|mask)_?(token)?_(id|index)s?"
)
# What names of fields do not tell.
_RESNET = {
    "use_timm_backbone": False,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 8, 8],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage2", "stage3", "stage4"],
    },
}
_ONE = {
    **_RESNET,
    "backbone_config": {**_RESNET["backbone_config"], "out_features": ["stage4"]},
}
_SERIES = dict(prediction_length=4, lags_sequence=[1, 2, 3], num_time_features=1)
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["conditional_detr", "dab-detr", "detr", "table-transformer"], _ONE
    ),
    "deformable_detr": _RESNET,
    **dict.fromkeys(["autoformer", "informer", "time_series_transformer"], _SERIES),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, num_experts_per_tok=2),
    "esm": dict(vocab_size=33, mask_token_id=32),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "nemotron": dict(num_key_value_heads=2),
}


def shrunk(config: Any, tokens: dict[int, int]) -> Any:
    """Makes a config of the same class whose model is tiny.

    `tokens` collects the new ids of special tokens beyond the vocabulary.
    """
    kind = type(config)
    declared = {x.name: x.default for x in kind.__dataclass_fields__.values()}
    default, chosen = vars(kind()), {}
    given = {
        name: value
        for name, value in vars(config).items()
        if name in declared or name not in default
    }
    types = given.get("layer_types") or given.get("layers_block_type") or ()
    # One layer of each type.
    kept = [types.index(x) for x in dict.fromkeys(types)]
    kept = sorted(
        kept + [i for i in range(len(types)) if i not in kept][: 2 - len(kept)]
    )
    for name, value in given.items():
        is_list, is_part = isinstance(value, list | tuple), hasattr(value, "to_dict")
        is_derived = declared.get(name) is None and not (
            is_list or is_part or isinstance(value, dict)
        )
        new = _value(name, value, tokens)
        if kept and is_list and len(value) == len(types):
            new = type(value)(value[i] for i in kept)
        elif kept and value == len(types) and "layers" in name:
            new = len(kept)
        elif "key_value_heads" in name and isinstance(value, int):
            is_grouped = value not in (1, given.get("num_attention_heads"))
            new = HEADS // 2 if is_grouped else min(value, HEADS)
        same = value == default.get(name)
        if not same or (new is not value and not is_derived):
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
    if _TOKEN.fullmatch(name) or (name.endswith("_id") and value > _HIGHEST):
        if value <= _HIGHEST:
            return value
        return tokens.setdefault(value, VOCABULARY - 1 - len(tokens))
    most = next((x for key, x in _SIZES.items() if re.fullmatch(key, name)), None)
    if most == HEADS and value < HEADS:
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
    config = shrunk(
        transformers.CONFIG_MAPPING[kind](), {"mrope": 0} if has_axes else {}
    )
    config._attn_implementation = "eager"
    module = build(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def arguments(module: Any) -> dict[str, list[np.ndarray]]:
    """Makes arguments of models by name, each in several layouts."""
    config, random = module.config, np.random.default_rng(0)
    values = list(_values(config))

    def find(default: Any, *names: str) -> Any:
        first = (x for name in names for key, x in values if key == name and x)
        found = next(first, default)
        return max(found) if isinstance(found, list | tuple) else found

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    def ids(count: int = T) -> np.ndarray:
        return random.choice(plain, (B, count))

    special = {
        x for key, x in values if key.endswith(("id", "index")) and isinstance(x, int)
    }
    rows = [
        x
        for key, x in values
        if key.endswith("vocab_size")
        and isinstance(x, int)
        and x > 9
        and "type" not in key
    ]
    plain = sorted({*range(_LOWEST, min(_HIGHEST, *rows, _HIGHEST))} - special)
    side = find(SIDE, "image_size", "input_size", "img_size")
    channels = find(3, "num_channels", "in_channels", "in_chans")
    patch, frames = find(8, "patch_size"), find(4, "num_frames", "frames_per_clip")
    tubes, width = find(1, "temporal_patch_size"), find(WIDTH, "hidden_size", "d_model")
    mels = find(16, "num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size")
    sound = 2 * find(32, "max_source_positions")
    grid, patches = np.array([[1, 4, 4]] * B), channels * tubes * patch**2
    images = [
        normal(B, channels, side, side),
        normal(B, frames, channels, side, side),
        normal(B * 16, patches),
        normal(B * 16, channels, patch, patch),
        normal(B, 16, patches),
    ]
    sounds = [
        normal(B, mels, sound),
        normal(B, sound, mels),
        normal(B, SAMPLES),
        normal(B, 1, SAMPLES),
        normal(B, 1, sound, mels),
    ]
    corners = np.sort(random.integers(0, 60, (B, T, 2, 2)), 2).reshape(B, T, 4)
    return {
        "input_ids": [ids()],
        "pixel_values": images,
        "image_grid_thw": [grid],
        "input_features": sounds,
        "input_values": [*sounds[2:4], *sounds[:2], sounds[4]],
        "decoder_input_ids": [ids(5)],
        "bbox": [corners],
        # The rest only where it has to be there.
        "grid_thw": [grid],
        "target_sizes": [grid[:, 1:]],
        "merge_sizes": [np.full(B, 2)],
        "hidden_states": [normal(B, T, width), *images[2:]],
        "inputs_embeds": [normal(B, T, width)],
        "encoder_hidden_states": [normal(B, 5, find(width, "encoder_hidden_size"))],
        "query_embeds": [normal(B, 8, width)],
        "qformer_input_ids": [ids()],
        "pixel_attention_mask": [np.ones((B, 16), int)],
        "spatial_shapes": [grid[:, 1:]],
        "attention_mask": [np.ones((B, T), int)],
        "input_features_mask": [np.ones((B, sound), int)],
        "spectrogram": [sounds[1]],
        "past_values": [normal(B, 7), normal(B, 64, channels), normal(B, 64)],
        "past_time_features": [normal(B, 7, 1)],
        "past_observed_mask": [np.ones((B, 7)), np.ones((B, 64, channels))],
        "future_values": [normal(B, 4)],
        "future_time_features": [normal(B, 4, 1)],
        "past_values_padding": [np.zeros((B, 64))],
        "states": [normal(B, T, 17)],
        "actions": [normal(B, T, 4)],
        "rewards": [normal(B, T, 1)],
        "returns_to_go": [normal(B, T, 1)],
        "timesteps": [ids() % 32],
        "freq": [np.zeros((B, 1), int)],
        "visual_feats": [normal(B, 5, find(WIDTH, "visual_feat_dim"))],
        "visual_pos": [normal(B, 5, 4)],
        "inputs": [normal(B, T, width)],
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
    with torch.no_grad():
        return module(**{k: torch.as_tensor(x) for k, x in given.items()}, **options)


def inputs(module: Any) -> dict[str, np.ndarray]:
    """Finds inputs that torch itself takes, of as many sides as possible."""
    known, table = inspect.signature(module.forward).parameters, arguments(module)
    required = [
        name
        for name, x in known.items()
        if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD
    ]
    main = np.atleast_1d(module.main_input_name).tolist()
    usual = [x for x in [*table][:7] if x in known]
    usual += [x for x in ("future_values", "future_time_features") if x in known]
    choices = [usual, [*main, "decoder_input_ids"], main, ["input_ids"]]
    choices += [[*main, "encoder_hidden_states"], ["inputs_embeds"]]
    first_error = LookupError(f"no inputs are known for {', '.join(known)}")
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
                    if layout == 0 and isinstance(first_error, LookupError):
                        first_error = caught
                    features = re.search(r"features:? (\d+)", str(caught))
                    if not features or "input_ids" not in given:
                        break
                    given = _with_image(module, given, int(features[1]))
    raise first_error


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
            record |= {"model": type(module).__name__, "parts": _parts(module)}
            given = inputs(module)
            record["inputs"] = {name: x.shape for name, x in given.items()}
        except (Exception, MemoryError) as error:
            return record | {"reason": _line(error)}
        try:
            return record | dict(zip(("verdict", "reason"), _verdict(module, given)))
        except (Exception, MemoryError) as error:
            return record | {"verdict": "refused", "reason": _line(error)}


def _verdict(module: Any, given: dict[str, np.ndarray]) -> tuple[str, str]:
    import mha_haiku as mh
    from mha_haiku.interop.torch_modules import conversion

    expected = conversion._first(run(module, given)).float().numpy()
    subject = mh.wrap(module)
    actual = np.asarray(subject.logits(given), np.float32)
    if not _close(actual, expected):
        return "wrong", "the output differs"
    try:
        maps = [np.asarray(x.weights()) for x in subject.maps(given)]
    except ValueError as error:
        if "names no site" not in str(error):
            raise
        maps = []
    theirs = _attentions(module, given)
    missing = sum(not any(_close(y, x) for y in maps) for x in theirs)
    if missing == len(theirs) > 0 and not maps:
        return "refused", "attention is not recognized"
    if missing:
        return "wrong", f"{missing} of {len(theirs)} maps of torch are none of ours"
    return ("right", f"{len(maps)} maps") if maps else ("no attention", "")


def _attentions(module: Any, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Lists the weights that torch returns; some models return scores or means."""
    try:
        output = run(module, given, output_attentions=True)
        names = [name for name in output if name.endswith("attentions")]
    except Exception:
        return []  # it has no such option
    arrays = [
        x.float().numpy() for name in names for x in output[name] or () if x is not None
    ]
    return [x for x in arrays if x.ndim == 4 and np.allclose(x.sum(-1), 1, atol=1e-4)]


def _close(actual: np.ndarray, expected: np.ndarray) -> bool:
    if actual.shape != expected.shape:
        return False
    scale = max(np.abs(expected).max(initial=0), 1e-30)
    return bool(np.abs(actual - expected).max(initial=0) <= TOLERANCE * scale)


def _parts(module: Any) -> bool:
    """Checks whether a part of the module is called attention."""
    return any(
        re.search("(?i)attention|attn", type(x).__name__) for x in module.modules()
    )


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# --- many types -----------------------------------------------------------------------


def _work(pipe: Any, gigabytes: int) -> None:
    """Tries types that come through a pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    while kind := pipe.recv():
        pipe.send(tried(kind))


class _Worker:
    """A process that tries one type after another."""

    def __init__(self, gigabytes: int):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, gigabytes), daemon=True
        )
        self.process.start()
        theirs.close()
        self.kind, self.end, self.count = "", math.inf, 0

    def start(self, kind: str, seconds: float) -> None:
        self.kind, self.end = kind, time.monotonic() + seconds
        self.count += 1
        self.pipe.send(kind)

    def result(self) -> dict[str, Any] | None:
        """Returns the record of the type, None while it is not there."""
        reason = "the process ended, as out of memory"
        try:
            if self.pipe.poll():
                return self.pipe.recv()
            if time.monotonic() < self.end:
                return None
            reason = "it took too long"
        except (EOFError, OSError):
            pass
        self.stop()
        return {"type": self.kind, "verdict": "refused", "reason": reason}

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def records(kinds: list[str], workers: int, seconds: float, gigabytes: int):
    """Lists the records of types, as processes come to them."""
    waiting, busy = kinds[::-1], []
    idle = []
    while waiting or busy:
        while waiting and len(busy) < workers:
            worker = idle.pop() if idle else _Worker(gigabytes)
            # The first type also pays for imports.
            worker.start(waiting.pop(), seconds + (0 if worker.count else 60))
            busy.append(worker)
        connection.wait([worker.pipe for worker in busy], 1)
        for worker in list(busy):
            if record := worker.result():
                busy.remove(worker)
                yield record
                if worker.process.is_alive() and worker.count < _TYPES_OF_A_PROCESS:
                    idle.append(worker)
                else:
                    worker.stop()
    for worker in idle:
        worker.stop()


def table(found: dict[str, dict[str, Any]]) -> str:
    """Writes the types of each verdict as Markdown, refused ones by their reasons."""
    names = "transformers", "torch", "torchax", "jax"
    versions = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in names)
    groups = {x: [r for r in found.values() if r["verdict"] == x] for x in VERDICTS}
    lines = ["# Model types of transformers under `mh.wrap`", "", *_TEXT, ""]
    lines += [f"With {versions}:", "", "| verdict | types |", "|---|---|"]
    lines += [f"| {x} | {len(group)} |" for x, group in groups.items()]
    for verdict, group in groups.items():
        lines += ["", f"## {verdict.capitalize()}", ""]
        if verdict in VERDICTS[:2]:
            names = ", ".join(sorted(r["type"] for r in group))
            lines += textwrap.wrap(names, 110, break_on_hyphens=False) or ["None."]
            continue
        by_reason = collections.defaultdict(list)
        for r in group:
            by_reason[r["reason"][:150].replace("|", "\\|")].append(r["type"])
        lines += ["| types | reason |", "|---|---|"] if group else ["None."]
        ordered = sorted(by_reason.items(), key=lambda x: (-len(x[1]), x[1]))
        lines += [f"| {', '.join(sorted(x))} | {reason} |" for reason, x in ordered]
    return "\n".join(lines) + "\n"


def main(
    *,
    types: str = "",
    results: str = "",
    out: str = "",
    workers: int = 2,
    seconds: int = 120,
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
        for name in kinds:
            checks.choice("--types", name, every)
        checks.positive_integer("--workers", workers)
    found = {}
    if results and path.exists():
        lines = map(json.loads, path.read_text().splitlines())
        found = {record["type"]: record for record in lines}
    missing = [kind for kind in kinds if kind not in found]
    with tqdm.tqdm(total=len(missing), unit="type") as bar:
        for record in records(missing, workers, seconds, gigabytes):
            found[record["type"]] = record
            bar.update()
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
