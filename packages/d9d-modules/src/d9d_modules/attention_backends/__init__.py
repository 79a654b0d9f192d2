"""Attention backends behind one protocol, selected by the features that a call needs."""
