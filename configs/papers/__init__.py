"""Configs of published results, made again small."""
