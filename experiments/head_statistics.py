"""Measures and draws statistics of each head over held-out examples.

Run: python -m experiments.head_statistics --workdir=runs/reverse
"""

from experiments import main

if __name__ == "__main__":
    main("statistics")
