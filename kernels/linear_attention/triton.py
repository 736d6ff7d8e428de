"""Linear attention in Triton: the states between chunks (`kernels.linear_attention.walks`)."""

from kernels.linear_attention.walks import chunk_end_gradients, chunk_starts

__all__ = ["chunk_end_gradients", "chunk_starts"]
