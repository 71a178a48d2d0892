# SPDX-License-Identifier: Apache-2.0
"""A C library for the tests of `callgate.cfunc`, compiled by the system's C compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#include <complex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void saxpy(int n, float a, const float *x, float *y) {
  for (int i = 0; i < n; ++i) y[i] += a * x[i];
}
double dot(const double *x, const double *y, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

/* Of each type: an array times a number, and a function of a number. */
#define OF_TYPE(name, type)                                      \
  void scale_##name(const type *x, type by, type *y, long n) {   \
    for (long i = 0; i < n; ++i) y[i] = (type)(x[i] * by);       \
  }                                                              \
  type twice_##name(type x) { return (type)(x + x); }
OF_TYPE(bool, bool)
OF_TYPE(int8, int8_t)
OF_TYPE(int16, short)
OF_TYPE(int32, int)
OF_TYPE(int64, long long)
OF_TYPE(uint8, unsigned char)
OF_TYPE(uint16, uint16_t)
OF_TYPE(uint32, unsigned)
OF_TYPE(uint64, unsigned long)
OF_TYPE(float16, _Float16)
OF_TYPE(float32, float)
OF_TYPE(float64, double)
OF_TYPE(complex64, float complex)
OF_TYPE(complex128, double _Complex)

/* Column-major, as Fortran has them: a(i, j) += 10 i + j; b = its product with a vector. */
void add_index_(int *m, int *n, double *a, int *lda) {
  for (int j = 0; j < *n; ++j)
    for (int i = 0; i < *m; ++i) a[i + *lda * j] += 10 * i + j;
}
void first_column_(int *m, int *n, int *k, const float *a, float *out) {
  /* out(m, n) = a(:, :, 1) of a(m, n, k) */
  memcpy(out, a, sizeof(float) * (size_t)(*m * *n));
  (void)k;
}
void fill_columns(float *out, int m, int n, int k) {
  for (int i = 0; i < m * n * k; ++i) out[i] = (float)i;
}

/* Writes into what it gets. */
double sum_and_clear(double *x, long n) {
  double sum = 0;
  for (long i = 0; i < n; ++i) sum += x[i], x[i] = 0;
  return sum;
}
void reversed(const double *x, double *work, double *y, int n) {
  for (int i = 0; i < n; ++i) work[n - 1 - i] = x[i];
  for (int i = 0; i < n; ++i) y[i] = work[i];
}

/* Numbers that say what went wrong. */
int half(int x, int *y) {
  if (x % 2) return x < 0 ? -7 : 3;
  *y = x / 2;
  return 0;
}
void checked_(int *n, double *x, double *y, int *info) {
  *info = *n > 3 ? -1 : x[0] < 0 ? 4 : 0;
  for (int i = 0; i < *n; ++i) y[i] = 2 * x[i];
}

/* Pointers to what no array can hold. */
struct counter { long calls; double step; };
double advance(struct counter *counter, double x) {
  __atomic_fetch_add(&counter->calls, 1, __ATOMIC_RELAXED);
  return x + counter->step;
}
double apply(double (*f)(double), double x, void *unused) { return unused ? 0 : f(x); }
double cube(double x) { return x * x * x; }

void spell(const char *text, char mark, unsigned char *out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = (unsigned char)(i < strlen(text) ? text[i] : mark);
}
void copy_bytes(const void *from, void *to, size_t bytes) { memcpy(to, from, bytes); }
void split(double x, double *whole, double *part) {
  *whole = (double)(long)x;
  *part = x - *whole;
}
double power(double x, const int *n) {
  double y = 1;
  for (int i = 0; i < *n; ++i) y *= x;
  return y;
}
void four_numbers(const float *x, int a, int b, int c, int d, int k, int *out) {
  (void)x, (void)k;
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}
long count_calls(void) { static long calls; return ++calls; }
"""


def build(folder: Path) -> Path:
  compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
  if compiler is None:
    pytest.skip("no C compiler")
  source, library = folder / "functions.c", folder / "libfunctions.so"
  source.write_text(SOURCE)
  subprocess.run(
    [compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=120
  )
  return library


def declared(library: ctypes.CDLL, name: str, restype: object, *argtypes: object) -> object:
  """A function of ctypes that knows its type."""
  function = getattr(library, name)
  function.restype, function.argtypes = restype, list(argtypes)
  return function
