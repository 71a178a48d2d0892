// A call frame's buffers as ArrayViews, and a call's attributes. Reads XLA's C structs directly: on
// the fast path the typed wrappers would copy what is here.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/attributes.h"
#include "core/call.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/lifetime.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// The core's dtype codes are XLA's.
inline constexpr auto XLA_FFI_DataType_Pred = XLA_FFI_DataType_PRED;  // NOLINT: the table's name
#define X(identifier, code, name, bits) static_assert(XLA_FFI_DataType_##identifier == (code));
CALLGATE_DTYPES(X)
#undef X

// Up to kInline buffers a side need no allocation. Only what the call has is written: clearing all
// the room would cost as much as the rest of a kernel's path.
class DecodedCall : Immovable {
 public:
  // Borrows from the frame. A result that is a token has no memory and is left out.
  explicit DecodedCall(const XLA_FFI_CallFrame& frame) {
    operands_.decode(frame.args.size, frame.args.args);
    results_.decode(frame.rets.size, frame.rets.rets);
  }

  std::span<const ArrayView> operands() const noexcept { return operands_.views(); }
  std::span<ArrayView> results() noexcept { return results_.views(); }
  void drop_last_operand() noexcept { operands_.drop_last(); }

 private:
  static constexpr std::size_t kInline = 16;

  class Views {
   public:
    void decode(std::int64_t count, void** buffers) {
      if (count > static_cast<std::int64_t>(kInline)) [[unlikely]] {
        overflow_ = std::make_unique_for_overwrite<ArrayView[]>(static_cast<std::size_t>(count));
        data_ = overflow_.get();
      }
      for (std::int64_t i = 0; i < count; ++i) {
        const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(buffers[i]);
        if (buffer.dtype == XLA_FFI_DataType_TOKEN) continue;
        std::construct_at(data_ + count_++, buffer.data, buffer.dims,
                          static_cast<std::int32_t>(buffer.rank), static_cast<DType>(buffer.dtype));
      }
    }
    std::span<ArrayView> views() const noexcept { return {data_, count_}; }
    void drop_last() noexcept { --count_; }

   private:
    // Room for ArrayViews, without their initial values.
    union Room {
      Room() noexcept {}  // NOLINT: left as it is
      std::array<ArrayView, kInline> views;
    } inline_;
    std::unique_ptr<ArrayView[]> overflow_;
    ArrayView* data_ = inline_.views.data();
    std::size_t count_ = 0;
  };

  Views operands_, results_;
};

// The run's id; -1 where XLA has none.
inline std::int64_t decode_run(const XLA_FFI_CallFrame& frame) noexcept {
  XLA_FFI_RunId_Get_Args run{XLA_FFI_RunId_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, -1};
  return succeeded(frame.api, frame.api->XLA_FFI_RunId_Get(&run)) ? run.run_id : -1;
}

// The device's ordinal; -1 where XLA has none.
inline std::int64_t decode_device(const XLA_FFI_CallFrame& frame) noexcept {
  XLA_FFI_DeviceOrdinal_Get_Args device{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                        frame.ctx, -1};
  bool known = succeeded(frame.api, frame.api->XLA_FFI_DeviceOrdinal_Get(&device));
  return known ? device.device_ordinal : -1;
}

inline CallContext decode_context(const XLA_FFI_CallFrame& frame) noexcept {
  return {.device = decode_device(frame), .run = decode_run(frame), .thread = pthread_self()};
}

// The stream that a GPU's program runs on. Throws Error where XLA has none.
inline void* decode_stream(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_Stream_Get_Args args{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  check(frame.api, frame.api->XLA_FFI_Stream_Get(&args), "XLA gave no stream: ");
  return args.stream;
}

// --- Attributes, as XLA hands them to the instantiate stage --------------------------------------

inline std::string_view text_of(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

// `code`: an XLA_FFI_DataType, or a number in its place.
inline DType dtype_of(int code, std::string_view name) {
  if (auto dtype = dtype_from_code(code)) return *dtype;
  throw Error("attribute '" + std::string(name) + "'", "a known element type",
              "code " + std::to_string(code));
}

// XLA's attributes have no arrays of bools, small floats or complex numbers: Python sends these as
// dictionaries of their bytes (python/callgate/_core/static_values.py). False for others.
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
  one != nullptr ? to.add_number(name, type, bytes->data)
                 : to.add_numbers(name, type, bytes->data, bytes->count / size);
  return true;
}

// All of them. Throws Error for what is no number, string, array of numbers or dictionary.
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
