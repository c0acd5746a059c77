"""Writes a text with a trained run: continues a prompt, or answers a source.

Run: python -m experiments.generate --workdir=runs/text_lm --prompt="The "
"""

from experiments import main

if __name__ == "__main__":
    main("generate")
