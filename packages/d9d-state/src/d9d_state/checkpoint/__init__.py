"""Job checkpoints: all that a job needs to go on as if it had never stopped."""
