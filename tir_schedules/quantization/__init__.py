"""Affine quantization and packing inside a compiled program."""
