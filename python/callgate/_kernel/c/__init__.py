"""Kernels that are C functions of other libraries."""
