"""The training job: planned, built and run."""
