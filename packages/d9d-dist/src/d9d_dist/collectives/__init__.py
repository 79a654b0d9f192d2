"""Collectives of tensors, JSON and trees, differentiable and not, and agreement between ranks."""
