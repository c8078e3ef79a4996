"""Fused attention: the rule, what a kernel computes, and its kernels for CPUs and CUDA."""
