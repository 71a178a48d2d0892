// The elements of an array as C++ values, whatever its dtype: what sinks write out as text, widen
// or compute with. Any thread; nothing is owned.
//
// Types that C++ lacks are widened without loss: bfloat16, float16 and the smaller floats to float,
// packed integers (the first element in a byte's low bits, as XLA has them) to 64 bits.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "callgate/small_floats.h"
#include "core/array_view.h"
#include "core/dtype.h"
#include "core/error.h"

namespace callgate {

namespace elements {

// Elements are read with memcpy: a lane of a record starts wherever the lane before it ends.
template <typename Stored, typename Visit>
void each_stored(const ArrayView& view, Visit&& visit) {
  const char* data = static_cast<const char*>(view.data);
  for (std::size_t i = 0, count = view.size(); i < count; ++i) {
    Stored value;
    std::memcpy(&value, data + i * sizeof(Stored), sizeof(Stored));
    visit(value);
  }
}

// The raw bits of each element of a packed type.
template <typename Visit>
void each_packed(const ArrayView& view, Visit&& visit) {
  const auto* data = static_cast<const unsigned char*>(view.data);
  auto width = static_cast<std::size_t>(bits(view.dtype)), per_byte = 8 / width;
  for (std::size_t i = 0, count = view.size(); i < count; ++i) {
    unsigned byte = data[i / per_byte];
    visit((byte >> (i % per_byte * width)) & ((1U << width) - 1U));
  }
}

}  // namespace elements

// Calls visit(value) for each element in row-major order. The value is a bool, std::int64_t,
// std::uint64_t, float, double, std::complex<float> or std::complex<double>, by the dtype's kind.
template <typename Visit>
void each_element(const ArrayView& view, Visit&& visit) {
  using elements::each_stored;
  auto as_signed = [&](auto value) { visit(static_cast<std::int64_t>(value)); };
  auto as_unsigned = [&](auto value) { visit(static_cast<std::uint64_t>(value)); };
  auto as_float = [&](auto value) { visit(static_cast<float>(value)); };
  switch (view.dtype) {
    case DType::kPred: return each_stored<std::uint8_t>(view, [&](auto v) { visit(v != 0); });
    case DType::kS8: return each_stored<std::int8_t>(view, as_signed);
    case DType::kS16: return each_stored<std::int16_t>(view, as_signed);
    case DType::kS32: return each_stored<std::int32_t>(view, as_signed);
    case DType::kS64: return each_stored<std::int64_t>(view, as_signed);
    case DType::kU8: return each_stored<std::uint8_t>(view, as_unsigned);
    case DType::kU16: return each_stored<std::uint16_t>(view, as_unsigned);
    case DType::kU32: return each_stored<std::uint32_t>(view, as_unsigned);
    case DType::kU64: return each_stored<std::uint64_t>(view, as_unsigned);
    case DType::kF16: return each_stored<float16>(view, as_float);
    case DType::kBF16: return each_stored<bfloat16>(view, as_float);
    case DType::kF32: return each_stored<float>(view, visit);
    case DType::kF64: return each_stored<double>(view, visit);
    case DType::kC64: return each_stored<std::complex<float>>(view, visit);
    case DType::kC128: return each_stored<std::complex<double>>(view, visit);
    case DType::kF8E5M2: return each_stored<float8_e5m2>(view, as_float);
    case DType::kF8E4M3FN: return each_stored<float8_e4m3fn>(view, as_float);
    case DType::kF8E4M3B11FNUZ: return each_stored<float8_e4m3b11fnuz>(view, as_float);
    case DType::kF8E5M2FNUZ: return each_stored<float8_e5m2fnuz>(view, as_float);
    case DType::kF8E4M3FNUZ: return each_stored<float8_e4m3fnuz>(view, as_float);
    case DType::kF8E4M3: return each_stored<float8_e4m3>(view, as_float);
    case DType::kF8E3M4: return each_stored<float8_e3m4>(view, as_float);
    case DType::kF8E8M0FNU: return each_stored<float8_e8m0fnu>(view, as_float);
    case DType::kF4E2M1FN: {
      constexpr float kValues[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};  // the sign is the fourth bit
      return elements::each_packed(
          view, [&](unsigned raw) { visit(raw < 8 ? kValues[raw] : -kValues[raw - 8]); });
    }
    case DType::kU1:
    case DType::kU2:
    case DType::kU4: return elements::each_packed(view, as_unsigned);
    case DType::kS1:
    case DType::kS2:
    case DType::kS4: {
      int unused = 64 - bits(view.dtype);  // shifting up and down again extends the sign
      return elements::each_packed(view, [&](unsigned raw) {
        visit(static_cast<std::int64_t>(std::uint64_t{raw} << unused) >> unused);
      });
    }
    case DType::kInvalid: break;
  }
  throw Error(ErrorCode::kInvalidArgument, "a sink", "a dtype that callgate knows",
              to_string(view));
}

}  // namespace callgate
