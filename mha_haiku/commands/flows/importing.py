"""`import_model`."""

from mha_haiku.commands.table import command
from mha_haiku.subjects import imported_runs
from mha_haiku.training.runs import progress


@command
def import_model(
    *, source: str, workdir: str, sequence_length: int | None = None, path: str = ""
) -> None:
    """Makes a run of a pretrained model, for all other commands.

    Run: python -m mha_haiku import_model --source=models/distilgpt2 --workdir=runs/gpt

    The source is a folder in the layout of Hugging Face (config.json,
    model.safetensors, tokenizer.json), a .gguf file, package:NAME of an installed
    package that ships a model, or a name on the hub, owner/name. Families: BERT,
    RoBERTa, DistilBERT, GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, GPT-NeoX.

    Causal and masked language models are measured by their loss, and can be trained on.
    Models without words to predict, as encoders of sentences, are measured by their
    drift: one minus the cosine of a sentence's vector with the whole model's vector.

    Args:
      source: Folder, .gguf file, package:NAME or name on the hub.
      workdir: Folder of the new run.
      sequence_length: Tokens in an example of the measurements; default: 128, 64 for
        sentences.
      path: UTF-8 file, or folder of files, with the text of the examples; default:
        Python's documentation.
    """
    with progress.during(f"importing {source}"):
        made = imported_runs.write(
            source, workdir, sequence_length=sequence_length, path=path
        )
    most = imported_runs.most_positions(made.config)
    print(f"{made}\n{made.task.sequence_length} of at most {most} positions")
    print(f"Run: {workdir}")
