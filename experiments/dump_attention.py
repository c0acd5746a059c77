"""Writes the attention maps of a trained run, as arrays and pictures.

Run: python -m experiments.dump_attention --workdir=runs/reverse --layers=0 --heads=0
"""

from experiments import main

if __name__ == "__main__":
    main("dump_attention")
