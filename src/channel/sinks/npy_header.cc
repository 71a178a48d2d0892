// SPDX-License-Identifier: Apache-2.0
// The text of a .npy file's header, written and read.
#include "channel/sinks/npy_header.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <system_error>

namespace callgate {
namespace {

// The numbers of "(3, 4)"; empty for any other text.
std::optional<std::vector<std::int64_t>> parse_shape(std::string_view text) {
  if (!text.starts_with('(')) return std::nullopt;
  std::vector<std::int64_t> shape;
  for (text.remove_prefix(1); !text.starts_with(')');) {
    std::int64_t extent = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), extent);
    if (error != std::errc() || extent < 0) return std::nullopt;
    shape.push_back(extent);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    text.remove_prefix(std::min(text.find_first_not_of(", "), text.size()));
  }
  return shape;
}

}  // namespace

bool npy_stores_as_is(DType dtype) noexcept {
  const std::string_view text = name(dtype);
  return bits(dtype) >= 8 && !text.starts_with("float8") && !text.starts_with("bfloat");
}

std::string npy_descr(DType dtype) {
  const std::string_view text = name(dtype);
  const char first = text.front();
  const char kind =
      text.starts_with("bool") || first == 'i' || first == 'u' || first == 'c' ? first : 'f';
  int bytes = bits(dtype) / 8;
  if (!npy_stores_as_is(dtype)) bytes = kind == 'f' ? 4 : 1;
  constexpr char kOrder = std::endian::native == std::endian::little ? '<' : '>';
  return std::string(1, bytes == 1 ? '|' : kOrder) + kind + std::to_string(bytes);
}

std::string NpyHeader::text() const {
  constexpr std::size_t kAlignment = 64, kRowDigits = 20;  // of the greatest number of rows
  std::string shape = std::to_string(rows) + ",";
  for (std::int64_t extent : row) ((shape += ' ') += std::to_string(extent)) += ',';
  if (!row.empty()) shape.pop_back();  // only a tuple of one needs the comma
  const std::string type = descr.starts_with('[') ? descr : "'" + descr + "'";
  std::string dict = "{'descr': " + type + ", 'fortran_order': False, 'shape': (" + shape + "), }";
  const std::size_t least = kPrefix + dict.size() + 1;
  const std::size_t roomy = (least + kRowDigits + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t total = bytes == 0 ? roomy : bytes;
  if (total < least || total > kLimit)
    throw Error("a .npy header", std::to_string(total) + " bytes", dict);
  dict.resize(total - kPrefix - 1, ' ');
  const std::size_t length = dict.size() + 1;
  std::string out(kMagic);
  out += static_cast<char>(length & 0xff);
  out += static_cast<char>(length >> 8);
  return out + dict + '\n';
}

NpyHeader NpyHeader::parse(std::string_view file, const std::string& path) {
  auto error = [&](const std::string& got) {
    return Error("the sink Npy cannot append to '" + path + "'",
                 "a .npy file of version 1.0, in C order, with a first axis", got);
  };
  if (!file.starts_with(kMagic) || file.size() < kPrefix) throw error("another kind of file");
  auto byte = [&](std::size_t at) { return std::size_t{static_cast<unsigned char>(file[at])}; };
  NpyHeader header;
  header.bytes = kPrefix + byte(8) + 256 * byte(9);
  if (file.size() < header.bytes) throw error("a file that ends in its header");
  const std::string_view dict = file.substr(kPrefix, header.bytes - kPrefix);
  const std::string_view descr = value_of(dict, "'descr'");
  const auto shape = parse_shape(value_of(dict, "'shape'"));
  const bool has_fields = descr.starts_with("[(") && descr.find(']') != std::string_view::npos;
  if ((!descr.starts_with('\'') && !has_fields) ||
      !value_of(dict, "'fortran_order'").starts_with("False") || !shape || shape->empty())
    throw error(std::string(dict.substr(0, dict.find_last_not_of(" \n") + 1)));
  header.descr =
      has_fields ? descr.substr(0, descr.find(']') + 1) : descr.substr(1, descr.find('\'', 1) - 1);
  header.rows = static_cast<std::uint64_t>(shape->front());
  header.row.assign(shape->begin() + 1, shape->end());
  return header;
}

std::string_view NpyHeader::value_of(std::string_view text, std::string_view key) {
  std::size_t at = text.find(key);
  if (at == std::string_view::npos) return {};
  at = text.find_first_not_of(": ", at + key.size());
  return at == std::string_view::npos ? std::string_view() : text.substr(at);
}

}  // namespace callgate
