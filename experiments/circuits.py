"""Finds the edges that carry the answer, and how much of it they carry.

Run: python -m experiments.circuits --workdir=runs/induction_two_layers
"""

from experiments import main

if __name__ == "__main__":
    main("circuit")
