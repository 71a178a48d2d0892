// See the header.
#include "xla/attributes.h"

#include <cstddef>
#include <span>
#include <utility>

namespace callgate::xla_ffi {
namespace {

std::string_view name_of(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

DType dtype_of(XLA_FFI_DataType code, std::string_view name) {
  auto dtype = dtype_from_code(static_cast<int>(code));
  if (dtype) return *dtype;
  throw Error(ErrorCode::kInvalidArgument, "attribute '" + std::string(name) + "'",
              "a known element type", "code " + std::to_string(static_cast<int>(code)));
}

Attributes decode(const XLA_FFI_Attrs& from) {
  Attributes to;
  for (std::int64_t i = 0; i < from.size; ++i) {
    std::string_view name = name_of(*from.names[i]);
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
        to.add_string(name, name_of(*static_cast<const XLA_FFI_ByteSpan*>(value)));
        break;
      case XLA_FFI_AttrType_DICTIONARY:
        to.add_dictionary(name, decode(*static_cast<const XLA_FFI_Attrs*>(value)));
        break;
      default:
        throw Error(ErrorCode::kInvalidArgument, "attribute '" + std::string(name) + "'",
                    "a number, a string, an array or a dictionary", "something else");
    }
  }
  return to;
}

}  // namespace

std::string text_attribute(const ::xla::ffi::Dictionary& attributes, std::string_view name) {
  if (!attributes.contains(name)) return {};
  auto value = attributes.get<std::string_view>(name);
  if (!value.has_value()) {
    throw Error(ErrorCode::kInvalidArgument, "attribute '" + std::string(name) + "'", "a string",
                value.error().message());
  }
  return std::string(*value);
}

Attributes decode_attributes(const XLA_FFI_Attrs& attributes, std::string_view name) {
  for (std::int64_t i = 0; i < attributes.size; ++i) {
    if (name_of(*attributes.names[i]) != name) continue;
    if (attributes.types[i] == XLA_FFI_AttrType_DICTIONARY)
      return decode(*static_cast<const XLA_FFI_Attrs*>(attributes.attrs[i]));
    throw Error(ErrorCode::kInvalidArgument, "attribute '" + std::string(name) + "'",
                "a dictionary", "something else");
  }
  return {};
}

}  // namespace callgate::xla_ffi
