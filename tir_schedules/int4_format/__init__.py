"""The INT4 format of weights, and how activations become integers."""
