"""Models of costs, one per file: equation, units and source are in the file's docstring."""
