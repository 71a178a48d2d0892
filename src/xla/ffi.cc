// SPDX-License-Identifier: Apache-2.0
// XLA's errors and attributes.
#include "xla/ffi.h"

#include <cstdio>
#include <utility>

namespace callgate::xla_ffi {
namespace {

// XLA's attributes have no arrays of bools, small floats or complex numbers. Python sends these as
// dictionaries of their bytes (python/callgate/_core/static_values.py). False for others.
bool add_encoded(Attributes& to, std::string_view name, const Attributes& entries) {
  const callgate_attribute* dtype = entries.find("callgate:dtype");
  const callgate_attribute* one = entries.find("callgate:number");
  const callgate_attribute* bytes = one != nullptr ? one : entries.find("callgate:numbers");
  if (dtype == nullptr || bytes == nullptr || dtype->kind != CALLGATE_NUMBER ||
      dtype->dtype != static_cast<int>(DType::kS32) || bytes->kind != CALLGATE_NUMBERS ||
      bytes->dtype != static_cast<int>(DType::kU8))
    return false;
  DType type = dtype_of(*static_cast<const std::int32_t*>(dtype->data), name);
  std::size_t size = storage_bytes(type, 1);
  if (one != nullptr ? bytes->count != size : bytes->count % size != 0)
    throw Error("attribute '" + std::string(name) + "'",
                (one != nullptr ? "the " : "a multiple of the ") + std::to_string(size) +
                    " bytes of a " + std::string(callgate::name(type)),
                std::to_string(bytes->count));
  one != nullptr ? to.add_number(name, type, bytes->data)
                 : to.add_numbers(name, type, bytes->data, bytes->count / size);
  return true;
}

}  // namespace

XLA_FFI_Error* make_error(const XLA_FFI_Api* api, const Error& error) {
  std::string text = valid_utf8(error.what());  // the program's caller decodes it
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                 static_cast<XLA_FFI_Error_Code>(error.code())};
  return api->XLA_FFI_Error_Create(&args);
}

std::string take_message(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  std::string message = ::xla::ffi::internal::GetErrorMessage(api, error);
  ::xla::ffi::internal::DestroyError(api, error);
  return message;
}

void check(const XLA_FFI_Api* api, XLA_FFI_Error* error, const char* failed) {
  if (error == nullptr) [[likely]]
    return;
  throw Error(ErrorCode::kInternal, failed + take_message(api, error));
}

void keep_failure(Callee& callee, const Error& error) {
  // Such as for lack of memory to store it.
  guarded([&] { callee.defer(error); },
          [&](const Error&) { std::fprintf(stderr, "%s\n", error.what()); });
}

DType dtype_of(int code, std::string_view name) {
  if (auto dtype = dtype_from_code(code)) return *dtype;
  throw Error("attribute '" + std::string(name) + "'", "a known element type",
              "code " + std::to_string(code));
}

Attributes decode_attributes(const XLA_FFI_Attrs& from) {
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
