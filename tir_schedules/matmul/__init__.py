"""Matrix products in PrimFuncs: what they compute, and how they are recognised."""
