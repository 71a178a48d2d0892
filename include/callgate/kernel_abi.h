// SPDX-License-Identifier: Apache-2.0
// The C structs that callgate and a library of kernels share: a call, and a kernel's description.
// Each change to them needs a new CALLGATE_ABI, and callgate refuses libraries with another one.
// Write kernels with callgate/kernel.h, which creates these structs from the parameter types.
#pragma once

#include <stddef.h>
#include <stdint.h>

// C names and C ways.
// NOLINTBEGIN(readability-identifier-naming, modernize-macro-to-enum)
#define CALLGATE_ABI 1

extern "C" {

// A dense, row-major array. `dtype` is XLA's code of the element type (XLA_FFI_DataType).
typedef struct callgate_array {
  void* data;
  const int64_t* dims;  // `rank` extents, outermost first
  int32_t rank;
  uint8_t dtype;
} callgate_array;

enum callgate_attribute_kind {
  CALLGATE_NUMBER = 0,      // `data`: one element of `dtype`
  CALLGATE_STRING = 1,      // `data`: `count` bytes
  CALLGATE_NUMBERS = 2,     // `data`: `count` elements of `dtype`
  CALLGATE_DICTIONARY = 3,  // `data`: `count` callgate_attributes, sorted by name
};

typedef struct callgate_attribute {
  const char* name;
  const void* data;
  uint64_t count;
  int32_t kind;
  uint8_t dtype;
} callgate_attribute;

struct callgate_call;

// callgate's services for a running kernel.
typedef struct callgate_services {
  // Runs body(data, first, last) on parts of [begin, end) of at least `grain`, on several threads,
  // including the calling one. Returns when all parts are done.
  void (*parallel_for)(const struct callgate_call* call, int64_t begin, int64_t end, int64_t grain,
                       void (*body)(void* data, int64_t first, int64_t last), void* data);
  // Memory until the call returns; null if the allocation fails.
  void* (*scratch)(const struct callgate_call* call, size_t bytes, size_t alignment);
  // The number of threads that parallel_for may use.
  int32_t (*threads)(const struct callgate_call* call);
  // The device's global number; -1 if it has none.
  int64_t (*device)(const struct callgate_call* call);
  // Stores the message of a call that is about to return a nonzero value. The first message counts.
  void (*fail)(const struct callgate_call* call, const char* message);
} callgate_services;

// One call. Parameter i takes `counts[i]` arrays or attributes, starting at `starts[i]`.
typedef struct callgate_call {
  const callgate_array* operands;
  const callgate_array* results;
  const callgate_attribute* attributes;
  const int32_t* starts;
  const int32_t* counts;
  const callgate_services* services;
  void* user_data;  // from the kernel's definition
} callgate_call;

// Returns 0 for success, and any other value after `fail`.
typedef int32_t (*callgate_function)(const callgate_call* call);

enum callgate_parameter_kind {
  CALLGATE_IN = 0,
  CALLGATE_OUT = 1,
  CALLGATE_INOUT = 2,
  CALLGATE_SCALAR = 3,
  CALLGATE_INS = 4,
  CALLGATE_OUTS = 5,
  CALLGATE_ATTR_NUMBER = 6,
  CALLGATE_ATTR_STRING = 7,
  CALLGATE_ATTR_NUMBERS = 8,
  CALLGATE_ATTR_DICTIONARY = 9,
  CALLGATE_CONTEXT = 10,
};

typedef struct callgate_parameter {
  int32_t kind;
  int32_t dtype;  // 0 for none
  int32_t rank;   // -1 for any
} callgate_parameter;

typedef struct callgate_kernel {
  uint32_t abi;
  int32_t parameter_count;
  const char* names;  // "saxpy, a, x, y, z": the kernel's name, then its parameters', if given
  const callgate_parameter* parameters;
  callgate_function function;
  const struct callgate_kernel* next;
} callgate_kernel;

}  // extern "C"
// NOLINTEND(readability-identifier-naming, modernize-macro-to-enum)
