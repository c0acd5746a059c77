"""The core: what everything else of the package stands on."""
