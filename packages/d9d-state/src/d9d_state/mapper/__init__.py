"""State mapper: a graph that converts tensors from one naming and layout to another."""
