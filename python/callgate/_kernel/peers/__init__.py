"""Kernels of other libraries with interfaces of their own: tvm_ffi and Warp."""
