"""Parameters that kernels leave open, and the database of what tuning found."""
