"""Matrix products on CPUs, with float and with INT4 weights."""
