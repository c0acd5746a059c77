"""Removes heads of a trained run by learned gates; compares with a new training.

Run: python -m experiments.learn_gates --workdir=runs/induction_two_layers
"""

from experiments import main

if __name__ == "__main__":
    main("learn_gates")
