"""Runs a command: `python -m mha_haiku train --config=configs/reverse.py`."""

import sys

from mha_haiku import commands

if __name__ == "__main__":
    commands.choose(sys.argv)
