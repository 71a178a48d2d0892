// SPDX-License-Identifier: Apache-2.0
// The leaves of a record for sinks: their names in files, and their elements as C++ values.
// Thread-safe; owns nothing.
//
// A lone leaf of the tap "loss" is called "loss", another leaf "loss/w/0"; for a tangent or
// cotangent "loss:tangent", "loss:cotangent/w/0". The Python sinks (`callgate.sinks.columns`) use
// the same names.
//
// Sinks write elements as text, widen them or compute with them. Types that C++ lacks are widened
// without loss: bfloat16, float16 and smaller floats to float, packed integers (the first element
// in a byte's low bits, as in XLA) to 64 bits.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "callgate/small_floats.h"
#include "channel/consumer.h"
#include "channel/record.h"
#include "core/array_view.h"
#include "core/error.h"

namespace callgate {

// The part of the whole array that a record's leaf has, without lanes: [begin, end) of each
// dimension.
struct LeafPart {
  const std::vector<std::int64_t>& whole;
  std::vector<std::int64_t> begin, end;
};

// A leaf's part; empty if the program ran on one device, or the part is unknown.
std::optional<LeafPart> part_of(const Record& record, std::size_t leaf);

// Elements are read with memcpy, because a lane of a record starts directly behind the lane before.
template <typename Stored, typename As, typename Visit>
void each_stored(const ArrayView& view, Visit&& visit) {
  const char* data = static_cast<const char*>(view.data);
  for (std::size_t i = 0, count = view.size(); i < count; ++i) {
    Stored value;
    std::memcpy(&value, data + i * sizeof(Stored), sizeof(Stored));
    visit(static_cast<As>(value));
  }
}

// The raw bits of each element of a packed type.
template <typename Visit>
void each_packed(const ArrayView& view, Visit&& visit) {
  const auto* data = static_cast<const unsigned char*>(view.data);
  auto width = static_cast<std::size_t>(bits(view.dtype)), per_byte = 8 / width;
  for (std::size_t i = 0, count = view.size(); i < count; ++i)
    visit((unsigned{data[i / per_byte]} >> (i % per_byte * width)) & ((1U << width) - 1U));
}

// A leaf's path without the syntax of its containers: "w/0/x" for "['w'][0].x".
std::string plain_path(std::string_view path);

// Throws Error if two leaves of a tap would have one name: {"a/b": x, "a": {"b": y}}.
void check_names(const std::string& sink, const Source& source);

// The sources that a sink knows, by Source::id, for sinks that store data by leaf name.
class NamedSources {
 public:
  struct Named {
    RecordViews views;
    std::vector<std::string> names;  // of the value's leaves
  };

  // Throws Error if another tap has one of the names: {"b": x} of 'a', and the tap 'a/b'.
  Named& of(const std::string& sink, const Source& source);

 private:
  std::unordered_map<std::uint64_t, Named> known_;
  std::map<std::string, std::string> owners_;  // taps by name
};

// Calls visit(value) for each element in row-major order. The value is a bool, std::int64_t,
// std::uint64_t, float, double, std::complex<float> or std::complex<double>, by the dtype's kind.
template <typename Visit>
void each_element(const ArrayView& view, Visit&& visit) {
  switch (view.dtype) {
    case DType::kPred: return each_stored<std::uint8_t, bool>(view, visit);
    case DType::kS8: return each_stored<std::int8_t, std::int64_t>(view, visit);
    case DType::kS16: return each_stored<std::int16_t, std::int64_t>(view, visit);
    case DType::kS32: return each_stored<std::int32_t, std::int64_t>(view, visit);
    case DType::kS64: return each_stored<std::int64_t, std::int64_t>(view, visit);
    case DType::kU8: return each_stored<std::uint8_t, std::uint64_t>(view, visit);
    case DType::kU16: return each_stored<std::uint16_t, std::uint64_t>(view, visit);
    case DType::kU32: return each_stored<std::uint32_t, std::uint64_t>(view, visit);
    case DType::kU64: return each_stored<std::uint64_t, std::uint64_t>(view, visit);
    case DType::kF16: return each_stored<float16, float>(view, visit);
    case DType::kBF16: return each_stored<bfloat16, float>(view, visit);
    case DType::kF32: return each_stored<float, float>(view, visit);
    case DType::kF64: return each_stored<double, double>(view, visit);
    case DType::kC64: return each_stored<std::complex<float>, std::complex<float>>(view, visit);
    case DType::kC128: return each_stored<std::complex<double>, std::complex<double>>(view, visit);
    case DType::kF8E5M2: return each_stored<float8_e5m2, float>(view, visit);
    case DType::kF8E4M3FN: return each_stored<float8_e4m3fn, float>(view, visit);
    case DType::kF8E4M3B11FNUZ: return each_stored<float8_e4m3b11fnuz, float>(view, visit);
    case DType::kF8E5M2FNUZ: return each_stored<float8_e5m2fnuz, float>(view, visit);
    case DType::kF8E4M3FNUZ: return each_stored<float8_e4m3fnuz, float>(view, visit);
    case DType::kF8E4M3: return each_stored<float8_e4m3, float>(view, visit);
    case DType::kF8E3M4: return each_stored<float8_e3m4, float>(view, visit);
    case DType::kF8E8M0FNU: return each_stored<float8_e8m0fnu, float>(view, visit);
    case DType::kF4E2M1FN: {
      constexpr float kValues[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};  // the sign is the fourth bit
      return each_packed(view,
                         [&](unsigned raw) { visit(raw < 8 ? kValues[raw] : -kValues[raw - 8]); });
    }
    case DType::kU1:
    case DType::kU2:
    case DType::kU4: return each_packed(view, [&](unsigned raw) { visit(std::uint64_t{raw}); });
    case DType::kS1:
    case DType::kS2:
    case DType::kS4: {
      int unused = 64 - bits(view.dtype);  // shifting up and down again extends the sign
      return each_packed(view, [&](unsigned raw) {
        visit(static_cast<std::int64_t>(std::uint64_t{raw} << unused) >> unused);
      });
    }
    case DType::kInvalid: break;
  }
  throw Error("a sink", "a dtype of JAX", to_string(view));
}

}  // namespace callgate
