"""Compares roll-out and raw attention with the effect of replacing inputs.

Run: python -m experiments.rollout --workdir=runs/rollout --train
"""

from experiments import main

if __name__ == "__main__":
    main("rollout")
