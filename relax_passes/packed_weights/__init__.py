"""Which weights are packed into INT4, and the functions that make and take the packed parts."""
