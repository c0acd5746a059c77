"""Writes what transformers computes with tiny models, for the tests of interop.

    pip install -e '.[parity]'
    python scripts/expect_transformers.py

It has to be run again only when tests/interop/small_models.py gets another model.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.interop import small_models  # noqa: E402


def make(case: str):
    """Returns a tiny model of transformers with the numbers of `small_models`."""
    import torch
    import transformers

    config_class, model_class, fields = small_models.CASES[case]
    config = getattr(transformers, config_class)(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = pathlib.Path(folder)
        from mha_haiku.core import arrays

        names = arrays.read_safetensors(path / "model.safetensors")
        shapes = {name: list(array.shape) for name, array in names.items()}
        arrays.write_safetensors(
            path / "model.safetensors",
            {
                name: small_models.parameter(name, shape)
                for name, shape in shapes.items()
            },
        )
        loaded = getattr(transformers, model_class).from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        stored = json.loads((path / "config.json").read_text())
    return loaded.eval(), stored, shapes


def outputs(case: str, model) -> dict:
    """Returns logits, last hidden states and attention weights, zeros in padding."""
    import torch

    given = small_models.inputs(case)
    options = {}
    if not case.startswith("vit"):
        mask = np.arange(small_models.T) < small_models.LENGTHS[:, None]
        options["attention_mask"] = torch.tensor(mask.astype(int))
    with torch.no_grad():
        result = model(
            torch.tensor(given),
            output_attentions=True,
            output_hidden_states=True,
            **options,
        )
    logits = getattr(result, "logits", getattr(result, "prediction_logits", None))
    last = getattr(result, "last_hidden_state", result.hidden_states[-1])
    found = {
        "attention": [
            small_models.valid(each.numpy(), 2) for each in result.attentions
        ],
        "output": small_models.valid(last.numpy(), 1),
    }
    if logits is not None:
        found["logits"] = small_models.valid(logits.numpy(), 1)
    return found


def rotary(case: str, change: dict) -> list[list[float]]:
    """Returns the rotary frequencies of each layer of a case whose config differs."""
    import torch
    import transformers

    fields = small_models.changed(case, change)
    config = transformers.CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # some settings fail there
        model(torch.tensor(small_models.inputs(case)))
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    found = model.rotary_emb
    names = [f"{kind}_inv_freq" for kind in kinds]
    return [
        getattr(found, x if hasattr(found, x) else "inv_freq").tolist() for x in names
    ]


def main() -> None:
    """Writes the file."""
    import transformers

    expected = {"transformers": transformers.__version__}
    for case in small_models.CASES:
        model, config, shapes = make(case)
        found = outputs(case, model)
        expected[case] = {"config": config, "arrays": shapes}
        expected[case] |= {
            name: [small_models.sample(each) for each in x]
            if isinstance(x, list)
            else small_models.sample(x)
            for name, x in found.items()
        }
    expected["rotary"] = [rotary(*each) for each in small_models.ROTARY]
    lines = [f'"{name}": {json.dumps(value)}' for name, value in expected.items()]
    small_models.EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
