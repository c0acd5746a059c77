"""Questions asked of a finished run, one file each."""
