// SPDX-License-Identifier: Apache-2.0
// The attributes of a call, in XLA's structs. The bytes say which there are: for each a kind, the
// length of its name, the name, and then what the kind asks for; a dictionary ends with a zero. The
// kinds are XLA's, and one more that it may have some day.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "core/array_view.h"
#include "core/attributes.h"
#include "targets.h"
#include "xla/ffi.h"

namespace callgate::fuzz {

inline constexpr int kAttributesDepth = 6;
inline constexpr int kKinds = 5;
static_assert(XLA_FFI_AttrType_ARRAY == 1 && XLA_FFI_AttrType_STRING == kKinds - 1);

// Owns a dictionary as XLA would, each value in memory of exactly its size.
class BuiltAttributes {
 public:
  const XLA_FFI_Attrs* dictionary(Bytes& in, int depth) {
    auto types = std::make_unique<std::vector<XLA_FFI_AttrType>>();
    auto names = std::make_unique<std::vector<XLA_FFI_ByteSpan*>>();
    auto values = std::make_unique<std::vector<void*>>();
    for (std::uint8_t kind = in.number(); kind != 0; kind = in.number()) {
      names->push_back(text(in));
      const int type = 1 + (kind - 1) % kKinds;
      types->push_back(static_cast<XLA_FFI_AttrType>(type));
      values->push_back(value(type, in, depth));
    }
    attrs_.push_back({});
    XLA_FFI_Attrs& made = attrs_.back();
    made.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    made.size = static_cast<std::int64_t>(names->size());
    made.types = types->data();
    made.names = names->data();
    made.attrs = values->data();
    types_.push_back(std::move(types));
    names_.push_back(std::move(names));
    values_.push_back(std::move(values));
    return &made;
  }

 private:
  void* value(int kind, Bytes& in, int depth) {
    if (kind == XLA_FFI_AttrType_SCALAR) return scalar(in);
    if (kind == XLA_FFI_AttrType_ARRAY) return array(in);
    if (kind == XLA_FFI_AttrType_STRING) return text(in);
    Bytes none("");
    Bytes& from = depth == 0 ? none : in;
    return const_cast<XLA_FFI_Attrs*>(dictionary(from, depth - 1));
  }

  void* copy(std::string_view bytes, std::size_t size) {
    memory_.push_back(std::make_unique<char[]>(size));
    std::memcpy(memory_.back().get(), bytes.data(), bytes.size());
    return memory_.back().get();
  }

  XLA_FFI_ByteSpan* text(Bytes& in) {
    const std::string_view bytes = in.take(in.number());
    spans_.push_back({static_cast<const char*>(copy(bytes, bytes.size())), bytes.size()});
    return &spans_.back();
  }

  // Codes that no XLA of today has, too: cast on purpose.
  static XLA_FFI_DataType any_dtype(std::uint8_t code) {
    // NOLINTNEXTLINE(clang-analyzer-optin.core.EnumCastOutOfRange)
    return static_cast<XLA_FFI_DataType>(code);
  }
  static std::size_t element_bytes(std::uint8_t code) {
    const auto dtype = dtype_from_code(code);
    return dtype ? storage_bytes(*dtype, 1) : 0;
  }

  XLA_FFI_Scalar* scalar(Bytes& in) {
    const std::uint8_t code = in.number() % 32;
    const std::size_t size = element_bytes(code);
    scalars_.push_back({any_dtype(code), copy(in.take(size), size)});
    return &scalars_.back();
  }

  XLA_FFI_Array* array(Bytes& in) {
    const std::uint8_t code = in.number() % 32, count = in.number();
    const auto dtype = dtype_from_code(code);
    const std::size_t size = dtype ? storage_bytes(*dtype, count) : 0;
    arrays_.push_back({any_dtype(code), count, copy(in.take(size), size)});
    return &arrays_.back();
  }

  std::deque<XLA_FFI_Attrs> attrs_;
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<std::unique_ptr<std::vector<XLA_FFI_AttrType>>> types_;
  std::vector<std::unique_ptr<std::vector<XLA_FFI_ByteSpan*>>> names_;
  std::vector<std::unique_ptr<std::vector<void*>>> values_;
};

// As a call site would read them. Throws Error for what it would refuse.
inline Attributes read_attributes(Bytes& in) {
  BuiltAttributes built;
  return xla_ffi::decode_attributes(*built.dictionary(in, kAttributesDepth));
}

}  // namespace callgate::fuzz
