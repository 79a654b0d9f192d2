"""Job checkpoints: the complete state that a training job needs to resume."""
