"""Experiment trackers; `d9d_metrics` exports their public names."""
