// SPDX-License-Identifier: Apache-2.0
// A call site's attributes, as call frames describe them. Owned by the site, used by its thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace runner {

// Attributes by name, in the order of names, as XLA has them.
struct Dictionary {
  struct Value {
    XLA_FFI_AttrType type = XLA_FFI_AttrType_STRING;
    std::string bytes;
    XLA_FFI_DataType dtype = XLA_FFI_DataType_INVALID;
    std::size_t count = 0;
    std::unique_ptr<Dictionary> entries;
    XLA_FFI_ByteSpan span{}, name{};
    XLA_FFI_Scalar scalar{};
    XLA_FFI_Array array{};
  };

  std::map<std::string, Value> values;
  std::vector<XLA_FFI_AttrType> types;
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> pointers;
  XLA_FFI_Attrs attrs{};

  // Valid until the dictionary changes.
  XLA_FFI_Attrs* describe() {
    types.clear(), names.clear(), pointers.clear();
    for (auto& [name, value] : values) {
      value.name = {name.data(), name.size()};
      types.push_back(value.type);
      names.push_back(&value.name);
      pointers.push_back(describe(value));
    }
    attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
             nullptr,
             static_cast<std::int64_t>(types.size()),
             types.data(),
             names.data(),
             pointers.data()};
    return &attrs;
  }

 private:
  static void* describe(Value& value) {
    switch (value.type) {
      case XLA_FFI_AttrType_STRING:
        value.span = {value.bytes.data(), value.bytes.size()};
        return &value.span;
      case XLA_FFI_AttrType_SCALAR:
        value.scalar = {value.dtype, value.bytes.data()};
        return &value.scalar;
      case XLA_FFI_AttrType_ARRAY:
        value.array = {value.dtype, value.count, value.bytes.data()};
        return &value.array;
      default: return value.entries->describe();
    }
  }
};

}  // namespace runner
