"""Training as pure functions: loss, optimizer, step and evaluation."""
