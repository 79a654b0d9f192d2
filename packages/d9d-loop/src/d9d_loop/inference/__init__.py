"""Inference over a dataset."""
