"""Scripts: flags, a checked config, one library call each."""
