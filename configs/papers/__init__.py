"""Configs that reproduce published results at a small size."""
