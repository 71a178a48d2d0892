// The attributes of a call, as XLA hands them to the instantiate stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "core/attributes.h"
#include "core/error.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

inline std::string_view text_of(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

// `code`: an XLA_FFI_DataType, or a number in its place.
inline DType dtype_of(int code, std::string_view name) {
  if (auto dtype = dtype_from_code(code)) return *dtype;
  throw Error("attribute '" + std::string(name) + "'", "a known element type",
              "code " + std::to_string(code));
}

// XLA's attributes have no arrays of bools, no small floats and no complex numbers. Python sends
// those as a dictionary of their bytes (python/callgate/_core/static_values.py). False for any
// other one.
inline bool add_encoded(Attributes& to, std::string_view name, const Attributes& entries) {
  const callgate_attribute* dtype = entries.find("callgate:dtype");
  const callgate_attribute* one = entries.find("callgate:number");
  const callgate_attribute* bytes = one != nullptr ? one : entries.find("callgate:numbers");
  if (dtype == nullptr || bytes == nullptr || dtype->kind != CALLGATE_NUMBER ||
      dtype->dtype != static_cast<int>(DType::kS32) || bytes->kind != CALLGATE_NUMBERS ||
      bytes->dtype != static_cast<int>(DType::kU8))
    return false;
  DType type = dtype_of(*static_cast<const std::int32_t*>(dtype->data), name);
  std::size_t size = storage_bytes(type, 1);
  if (one != nullptr ? bytes->count != size : bytes->count % size != 0) {
    throw Error("attribute '" + std::string(name) + "'",
                (one != nullptr ? "the " : "a multiple of the ") + std::to_string(size) +
                    " bytes of a " + std::string(callgate::name(type)),
                std::to_string(bytes->count));
  }
  if (one != nullptr)
    to.add_number(name, type, bytes->data);
  else
    to.add_numbers(name, type, bytes->data, bytes->count / size);
  return true;
}

// All of them: numbers, strings, arrays of numbers and dictionaries. Throws Error for anything
// else.
inline Attributes decode_attributes(const XLA_FFI_Attrs& from) {
  Attributes to;
  for (std::int64_t i = 0; i < from.size; ++i) {
    std::string_view name = text_of(*from.names[i]);
    const void* value = from.attrs[i];
    switch (from.types[i]) {
      case XLA_FFI_AttrType_SCALAR: {
        const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(value);
        to.add_number(name, dtype_of(scalar.dtype, name), scalar.value);
        break;
      }
      case XLA_FFI_AttrType_ARRAY: {
        const auto& array = *static_cast<const XLA_FFI_Array*>(value);
        to.add_numbers(name, dtype_of(array.dtype, name), array.data, array.size);
        break;
      }
      case XLA_FFI_AttrType_STRING:
        to.add_string(name, text_of(*static_cast<const XLA_FFI_ByteSpan*>(value)));
        break;
      case XLA_FFI_AttrType_DICTIONARY: {
        Attributes entries = decode_attributes(*static_cast<const XLA_FFI_Attrs*>(value));
        if (!add_encoded(to, name, entries)) to.add_dictionary(name, std::move(entries));
        break;
      }
      default:
        throw Error("attribute '" + std::string(name) + "'",
                    "a number, a string, an array or a dictionary", "something else");
    }
  }
  return to;
}

}  // namespace callgate::xla_ffi
