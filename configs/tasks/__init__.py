"""Tasks that only configs and claims use, each under the name of its file."""
