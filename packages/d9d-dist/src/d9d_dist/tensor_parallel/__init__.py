"""Tensor parallelism: ranks split the weights of a layer."""
