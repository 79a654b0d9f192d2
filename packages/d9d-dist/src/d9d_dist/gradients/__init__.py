"""Gradients of distributed parameters: their reduction over ranks, dtype, norm and clipping."""
