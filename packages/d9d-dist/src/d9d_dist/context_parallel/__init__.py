"""Context parallelism: ranks split the positions of each sequence and communicate in attention."""
