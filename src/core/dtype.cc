// Tables made from CALLGATE_DTYPES. Pure functions; any thread.
#include "core/dtype.h"

#include <array>

namespace callgate {
namespace {

struct Row {
  std::string_view name = "invalid";
  int bits = 0;
};

constexpr std::array<Row, kDTypeTableSize> make_rows() {
  std::array<Row, kDTypeTableSize> rows{};
#define X(identifier, code, name, bits) rows[code] = Row{name, bits};
  CALLGATE_DTYPES(X)
#undef X
  return rows;
}

constexpr auto kRows = make_rows();

// A later XLA may have codes beyond the table; row 0 is the invalid one.
constexpr const Row& row(DType dtype) noexcept {
  auto code = static_cast<std::size_t>(dtype);
  return kRows[code < kRows.size() ? code : 0];
}

}  // namespace

int bits(DType dtype) noexcept { return row(dtype).bits; }

std::string_view name(DType dtype) noexcept { return row(dtype).name; }

bool is_inexact(DType dtype) noexcept {
  std::string_view text = name(dtype);
  return text.starts_with("float") || text.starts_with("bfloat") || text.starts_with("complex");
}

std::size_t storage_bytes(DType dtype, std::size_t count) noexcept {
  return (count * static_cast<std::size_t>(bits(dtype)) + 7) / 8;
}

std::optional<DType> dtype_from_code(int code) noexcept {
  if (code <= 0 || static_cast<std::size_t>(code) >= kRows.size()) return std::nullopt;
  if (kRows[static_cast<std::size_t>(code)].bits == 0) return std::nullopt;
  return static_cast<DType>(code);
}

std::optional<DType> dtype_from_name(std::string_view name) noexcept {
  for (std::size_t code = 1; code < kRows.size(); ++code) {
    if (kRows[code].bits != 0 && kRows[code].name == name) return static_cast<DType>(code);
  }
  return std::nullopt;
}

}  // namespace callgate
