// SPDX-License-Identifier: Apache-2.0
// A library of kernels and plain C functions, as a user would build it; see kernels.py.
#include "callgate/kernel.h"

void nothing(cg::In<float, 0>, cg::Out<float, 0>) {}
CALLGATE_KERNEL(nothing, x, z);

extern "C" __attribute__((visibility("default"))) void bench_nothing(const float*, float*) {}
