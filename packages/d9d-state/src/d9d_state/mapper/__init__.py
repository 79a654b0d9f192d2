"""The state mapper: how the tensors of one naming and layout become those of another, as a graph."""
