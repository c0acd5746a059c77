"""Families of models of other libraries, with a table of names per family."""

from mha_haiku.interop.families import bert, gpt2, gpt_neox, llama

FAMILIES = {
    family.name: family
    for family in (bert.BERT, gpt2.GPT2, *llama.ALL, gpt_neox.GPT_NEOX)
}
