"""The core, on which the rest of the package is built."""
