"""Training as pure functions: loss, optimizer, step, evaluation and health."""
