"""Families of models of other libraries, with a table of names per family."""

from mha_haiku.interop.families import bert, gpt2, llama

FAMILIES = {family.name: family for family in (bert.BERT, gpt2.GPT2, *llama.ALL)}
