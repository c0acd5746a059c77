"""Removes the heads that a trained run needs least, and measures loss and speed.

Run: python -m experiments.prune_heads --workdir=runs/sort --sweep
"""

from experiments import main

if __name__ == "__main__":
    main("prune_heads")
