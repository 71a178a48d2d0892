// The C structs of the DLPack exchange protocol, versions 0 and 1, and the type codes callgate
// uses. Source of layout and codes: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>
#include <optional>

#include "core/dtype.h"

namespace callgate::dlpack {

struct Device {
  std::int32_t type;  // kCpu, kCuda, ...
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct ManagedTensorVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

inline constexpr std::int32_t kCpu = 1;
inline constexpr std::int32_t kCuda = 2;
inline constexpr std::int32_t kCudaManaged = 13;
inline constexpr std::uint64_t kReadOnly = 1;
inline constexpr std::uint64_t kCopied = 2;

// The DLPack type of a dtype; empty for packed ones, whose layout DLPack leaves open.
constexpr std::optional<DataType> data_type(DType dtype) noexcept {
  auto make = [](std::uint8_t code, std::uint8_t bits) { return DataType{code, bits, 1}; };
  switch (dtype) {
    case DType::kS8: return make(0, 8);
    case DType::kS16: return make(0, 16);
    case DType::kS32: return make(0, 32);
    case DType::kS64: return make(0, 64);
    case DType::kU8: return make(1, 8);
    case DType::kU16: return make(1, 16);
    case DType::kU32: return make(1, 32);
    case DType::kU64: return make(1, 64);
    case DType::kF16: return make(2, 16);
    case DType::kF32: return make(2, 32);
    case DType::kF64: return make(2, 64);
    case DType::kBF16: return make(4, 16);
    case DType::kC64: return make(5, 64);
    case DType::kC128: return make(5, 128);
    case DType::kPred: return make(6, 8);
    case DType::kF8E3M4: return make(7, 8);
    case DType::kF8E4M3: return make(8, 8);
    case DType::kF8E4M3B11FNUZ: return make(9, 8);
    case DType::kF8E4M3FN: return make(10, 8);
    case DType::kF8E4M3FNUZ: return make(11, 8);
    case DType::kF8E5M2: return make(12, 8);
    case DType::kF8E5M2FNUZ: return make(13, 8);
    case DType::kF8E8M0FNU: return make(14, 8);
    default: return std::nullopt;
  }
}

}  // namespace callgate::dlpack
