"""`sits_tvm.tune`: find the parameters of kernels by measurement."""
