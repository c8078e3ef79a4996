"""Kernels that quantize the activations of a product, see `int8_matmul`."""
