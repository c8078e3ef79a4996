"""Training: gradients, and quantization-aware training."""
