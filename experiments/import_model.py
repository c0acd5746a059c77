"""Makes a run of a pretrained model, for all other scripts.

Run: python -m experiments.import_model --source=models/distilgpt2 --workdir=runs/gpt

The source is a folder in the layout of Hugging Face (config.json, model.safetensors,
tokenizer.json), a .gguf file, package:NAME of an installed package that ships a model,
or a name on the hub, owner/name. Families: BERT, RoBERTa, DistilBERT, GPT-2, Llama,
Mistral, Qwen2, Qwen3, Gemma 1 to 3, GPT-NeoX.

Causal and masked language models are measured by their loss, and can be trained on.
Models without words to predict, as encoders of sentences, are measured by their drift:
one minus the cosine of a sentence's vector with the whole model's vector.
"""

import functools
import sys

from . import command_line, shared_flags

FLAGS = command_line.flag_values(
    {
        "source": (
            str,
            shared_flags.REQUIRED,
            "Folder, .gguf file, package:NAME or name on the hub.",
        ),
        "workdir": (str, shared_flags.REQUIRED, "Folder of the new run."),
        "sequence_length": (
            int,
            None,
            "Tokens in an example of the studies; default: 128, 64 for sentences.",
        ),
        "path": (
            str,
            "",
            "UTF-8 file, or folder of files, with the text of the examples; default: "
            "Python's documentation.",
        ),
    }
)


def main() -> None:
    from mha_haiku.subjects.studies import imported_runs
    from mha_haiku.training.runs import progress

    with progress.during(f"importing {FLAGS.source}"):
        made = imported_runs.write(
            FLAGS.source,
            FLAGS.workdir,
            sequence_length=FLAGS.sequence_length,
            path=FLAGS.path,
        )
    most = imported_runs.most_positions(made.config)
    print(f"{made}\n{made.task.sequence_length} of at most {most} positions")
    print(f"Run: {FLAGS.workdir}")


# Takes argv; returns the exit status.
run = functools.partial(command_line.run, main, FLAGS, __doc__)

if __name__ == "__main__":
    sys.exit(run(sys.argv))
