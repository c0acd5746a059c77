"""Trains a model and writes its attention maps.

Run: python -m experiments.train --config=configs/reverse.py
"""

from experiments import main

if __name__ == "__main__":
    main("train")
