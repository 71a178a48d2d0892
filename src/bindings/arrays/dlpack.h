// The C structs of the DLPack exchange protocol, versions 0 and 1, and the type codes callgate
// uses. Source of layout and codes: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "core/array_view.h"

namespace callgate::dlpack {

struct Device {
  std::int32_t type, id;  // kCpu, kCuda, ...
};

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t *shape, *strides;  // in elements
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  static constexpr const char* kName = "dltensor";  // of a capsule that nobody has taken it from
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct ManagedTensorVersioned {
  static constexpr const char* kName = "dltensor_versioned";
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

inline constexpr std::int32_t kCpu = 1, kCuda = 2, kCudaManaged = 13;  // of Device
inline constexpr std::uint64_t kReadOnly = 1, kCopied = 2;             // flags

// The DLPack type of a dtype; empty for packed ones, whose layout DLPack leaves open.
inline std::optional<DataType> data_type(DType dtype) noexcept {
  constexpr std::pair<DType, std::uint8_t> kCodes[] = {
      {DType::kS8, 0},          {DType::kS16, 0},         {DType::kS32, 0},
      {DType::kS64, 0},         {DType::kU8, 1},          {DType::kU16, 1},
      {DType::kU32, 1},         {DType::kU64, 1},         {DType::kF16, 2},
      {DType::kF32, 2},         {DType::kF64, 2},         {DType::kBF16, 4},
      {DType::kC64, 5},         {DType::kC128, 5},        {DType::kPred, 6},
      {DType::kF8E3M4, 7},      {DType::kF8E4M3, 8},      {DType::kF8E4M3B11FNUZ, 9},
      {DType::kF8E4M3FN, 10},   {DType::kF8E4M3FNUZ, 11}, {DType::kF8E5M2, 12},
      {DType::kF8E5M2FNUZ, 13}, {DType::kF8E8M0FNU, 14}};
  for (auto [known, code] : kCodes)
    if (known == dtype) return DataType{code, static_cast<std::uint8_t>(bits(dtype)), 1};
  return std::nullopt;
}

}  // namespace callgate::dlpack
