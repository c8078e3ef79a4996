"""`sits_tvm.tune`: find the parameters of INT4 kernels by measurement."""
