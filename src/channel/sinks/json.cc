// See the header.
#include "channel/sinks/json.h"

#include <array>
#include <charconv>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "channel/sinks/elements.h"

namespace callgate {
namespace {

void append_number(std::string& out, bool value) { out += value ? "true" : "false"; }

template <typename T>
  requires(std::is_arithmetic_v<T>)
void append_number(std::string& out, T value) {
  std::array<char, 32> text;  // the longest double takes 24
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) {
      out += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
      return;
    }
  }
  auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  std::string_view digits(text.data(), end);
  out += digits;
  if (std::is_floating_point_v<T> && digits.find_first_of(".e") == std::string_view::npos) {
    out += ".0";
  }
}

template <typename T>
void append_number(std::string& out, std::complex<T> value) {
  out += '[';
  append_number(out, value.real());
  out += ',';
  append_number(out, value.imag());
  out += ']';
}

// Writes the brackets and commas around elements that come in row-major order.
class Nesting {
 public:
  Nesting(std::string& out, std::span<const std::int64_t> dims)
      : out_(out), dims_(dims), index_(dims.size(), 0) {}

  void before() { out_.append(opening_, '['); }

  void after() {
    opening_ = 0;
    for (std::size_t axis = dims_.size(); axis-- > 0;) {
      if (++index_[axis] < dims_[axis]) {
        out_ += ',';
        return;
      }
      index_[axis] = 0;
      out_ += ']';
      ++opening_;
    }
  }

 private:
  std::string& out_;
  std::span<const std::int64_t> dims_;
  std::vector<std::int64_t> index_;
  std::size_t opening_ = index_.size();  // lists that begin with the next element
};

// An array without elements: [] of shape (0,), [[], []] of shape (2, 0).
void append_empty(std::string& out, std::span<const std::int64_t> dims) {
  out += '[';
  for (std::int64_t i = 0; i < dims.front(); ++i) {
    if (i != 0) out += ',';
    append_empty(out, dims.subspan(1));
  }
  out += ']';
}

}  // namespace

void append_json_string(std::string& out, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (char c : text) {
    auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (code < 0x20) {
      ((out += "\\u00") += kHex[code >> 4]) += kHex[code & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

void append_json_array(std::string& out, const ArrayView& view) {
  if (view.size() == 0) return append_empty(out, view.shape());
  Nesting nesting(out, view.shape());
  each_element(view, [&](auto value) {
    nesting.before();
    append_number(out, value);
    nesting.after();
  });
}

}  // namespace callgate
