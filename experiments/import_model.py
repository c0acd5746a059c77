"""Makes a run of a pretrained model, for all other commands.

Run: python -m experiments.import_model --source=models/distilgpt2 --workdir=runs/gpt
"""

from experiments import main

if __name__ == "__main__":
    main("import_model")
