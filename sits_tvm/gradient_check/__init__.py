"""The gate and the report on gradients: a float64 twin of a function, and what differs from it."""
