"""How `FixQuantizeGradient` reads quantization that is spelled in other ops."""
