"""Products with INT4 weights on the tensor cores of NVIDIA GPUs."""
