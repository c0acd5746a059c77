"""Configs: one run each, with its command and what to expect at the top."""
