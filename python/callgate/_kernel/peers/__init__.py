# SPDX-License-Identifier: Apache-2.0
"""Kernels of other libraries with interfaces of their own: tvm_ffi and Warp."""
