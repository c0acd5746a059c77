"""Computes attention rollout: how much of each input reaches a position.

Run: python -m experiments.rollout --workdir=runs/reverse
"""

from experiments import main

if __name__ == "__main__":
    main("rollout")
