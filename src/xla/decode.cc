// Reads XLA's C structs directly: on the fast path the typed wrappers would copy what is here.
#include "xla/decode.h"

#include <pthread.h>

#include <string>

namespace callgate::xla_ffi {

// The core's dtype codes are XLA's.
static_assert(static_cast<int>(DType::kPred) == XLA_FFI_DataType_PRED);
static_assert(static_cast<int>(DType::kS8) == XLA_FFI_DataType_S8);
static_assert(static_cast<int>(DType::kS16) == XLA_FFI_DataType_S16);
static_assert(static_cast<int>(DType::kS32) == XLA_FFI_DataType_S32);
static_assert(static_cast<int>(DType::kS64) == XLA_FFI_DataType_S64);
static_assert(static_cast<int>(DType::kU8) == XLA_FFI_DataType_U8);
static_assert(static_cast<int>(DType::kU16) == XLA_FFI_DataType_U16);
static_assert(static_cast<int>(DType::kU32) == XLA_FFI_DataType_U32);
static_assert(static_cast<int>(DType::kU64) == XLA_FFI_DataType_U64);
static_assert(static_cast<int>(DType::kF16) == XLA_FFI_DataType_F16);
static_assert(static_cast<int>(DType::kF32) == XLA_FFI_DataType_F32);
static_assert(static_cast<int>(DType::kF64) == XLA_FFI_DataType_F64);
static_assert(static_cast<int>(DType::kC64) == XLA_FFI_DataType_C64);
static_assert(static_cast<int>(DType::kBF16) == XLA_FFI_DataType_BF16);
static_assert(static_cast<int>(DType::kC128) == XLA_FFI_DataType_C128);
static_assert(static_cast<int>(DType::kF8E5M2) == XLA_FFI_DataType_F8E5M2);
static_assert(static_cast<int>(DType::kF8E4M3FN) == XLA_FFI_DataType_F8E4M3FN);
static_assert(static_cast<int>(DType::kS4) == XLA_FFI_DataType_S4);
static_assert(static_cast<int>(DType::kU4) == XLA_FFI_DataType_U4);
static_assert(static_cast<int>(DType::kF8E4M3B11FNUZ) == XLA_FFI_DataType_F8E4M3B11FNUZ);
static_assert(static_cast<int>(DType::kF8E5M2FNUZ) == XLA_FFI_DataType_F8E5M2FNUZ);
static_assert(static_cast<int>(DType::kF8E4M3FNUZ) == XLA_FFI_DataType_F8E4M3FNUZ);
static_assert(static_cast<int>(DType::kS2) == XLA_FFI_DataType_S2);
static_assert(static_cast<int>(DType::kU2) == XLA_FFI_DataType_U2);
static_assert(static_cast<int>(DType::kF8E4M3) == XLA_FFI_DataType_F8E4M3);
static_assert(static_cast<int>(DType::kF8E3M4) == XLA_FFI_DataType_F8E3M4);
static_assert(static_cast<int>(DType::kS1) == XLA_FFI_DataType_S1);
static_assert(static_cast<int>(DType::kU1) == XLA_FFI_DataType_U1);
static_assert(static_cast<int>(DType::kF4E2M1FN) == XLA_FFI_DataType_F4E2M1FN);
static_assert(static_cast<int>(DType::kF8E8M0FNU) == XLA_FFI_DataType_F8E8M0FNU);

inline void DecodedCall::Views::decode(std::int64_t count, void** buffers) {
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

DecodedCall::DecodedCall(const XLA_FFI_CallFrame& frame) {
  operands_.decode(frame.args.size, frame.args.args);
  results_.decode(frame.rets.size, frame.rets.rets);
}

CallContext decode_context(const XLA_FFI_CallFrame& frame) noexcept {
  CallContext context;
  XLA_FFI_DeviceOrdinal_Get_Args device{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                        frame.ctx, -1};
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_DeviceOrdinal_Get(&device)) {
    ::xla::ffi::internal::DestroyError(frame.api, error);
  } else {
    context.device = device.device_ordinal;
  }
  context.run = decode_run(frame);
  context.thread = pthread_self();
  return context;
}

std::int64_t decode_run(const XLA_FFI_CallFrame& frame) noexcept {
  XLA_FFI_RunId_Get_Args run{XLA_FFI_RunId_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, -1};
  XLA_FFI_Error* error = frame.api->XLA_FFI_RunId_Get(&run);
  if (error == nullptr) [[likely]]
    return run.run_id;
  ::xla::ffi::internal::DestroyError(frame.api, error);
  return -1;
}

void* decode_stream(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_Stream_Get_Args args{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  if (XLA_FFI_Error* error = frame.api->XLA_FFI_Stream_Get(&args)) [[unlikely]] {
    std::string message = ::xla::ffi::internal::GetErrorMessage(frame.api, error);
    ::xla::ffi::internal::DestroyError(frame.api, error);
    throw Error(ErrorCode::kInternal, "XLA gave no stream: " + message);
  }
  return args.stream;
}

}  // namespace callgate::xla_ffi
