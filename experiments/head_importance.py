"""Measures and draws how much a model needs each of its heads.

Run: python -m experiments.head_importance --workdir=runs/sort
"""

from experiments import main

if __name__ == "__main__":
    main("importance")
