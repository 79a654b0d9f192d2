"""Failed, lost and slow ranks: which one was the first, and what its process does now."""
