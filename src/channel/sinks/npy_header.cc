// Version 1.0 of the format: a magic, the length of a Python dict's text in two bytes, the text.
#include <bit>
#include <charconv>
#include <optional>

#include "channel/sinks/npy.h"
#include "core/error.h"

namespace callgate {
namespace {

constexpr std::string_view kMagic{"\x93NUMPY\x01\x00", 8};
constexpr std::size_t kPrefix = 10;  // the magic and the length
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kRowDigits = 20;  // of the greatest number of rows

// What follows `key` and a colon in the dict's text, without the space before it; "" where it is
// not there.
std::string_view value_of(std::string_view text, std::string_view key) {
  std::size_t at = text.find(key);
  if (at == std::string_view::npos) return {};
  at = text.find_first_not_of(": ", at + key.size());
  return at == std::string_view::npos ? std::string_view() : text.substr(at);
}

// The numbers of "(3, 4)"; nothing for anything else.
std::optional<std::vector<std::int64_t>> parse_shape(std::string_view text) {
  if (!text.starts_with('(')) return std::nullopt;
  std::vector<std::int64_t> shape;
  for (text.remove_prefix(1); !text.starts_with(')');) {
    std::int64_t extent = 0;
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), extent);
    if (error != std::errc() || extent < 0) return std::nullopt;
    shape.push_back(extent);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    std::size_t next = text.find_first_not_of(", ");
    if (next == std::string_view::npos) return std::nullopt;
    text.remove_prefix(next);
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
  char kind = 'f';
  if (text.starts_with("bool")) kind = 'b';
  if (text.starts_with("int")) kind = 'i';
  if (text.starts_with("uint")) kind = 'u';
  if (text.starts_with("complex")) kind = 'c';
  int bytes = bits(dtype) / 8;
  if (!npy_stores_as_is(dtype)) bytes = kind == 'f' ? 4 : 1;
  constexpr char kOrder = std::endian::native == std::endian::little ? '<' : '>';
  return std::string(1, bytes == 1 ? '|' : kOrder) + kind + std::to_string(bytes);
}

std::string NpyHeader::text() const {
  std::string shape = std::to_string(rows) + ",";
  for (std::int64_t extent : row) ((shape += ' ') += std::to_string(extent)) += ',';
  if (!row.empty()) shape.pop_back();  // only a tuple of one needs the comma
  std::string dict =
      "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  std::size_t total = bytes;
  if (total == 0) {
    total = kPrefix + dict.size() + kRowDigits + 1;
    total = (total + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (total < kPrefix + dict.size() + 1 || total > kNpyHeaderLimit)
    throw Error(ErrorCode::kInvalidArgument, "a .npy header", std::to_string(total) + " bytes",
                dict);
  dict.resize(total - kPrefix - 1, ' ');
  const std::size_t length = dict.size() + 1;
  std::string out(kMagic);
  out += static_cast<char>(length & 0xff);
  out += static_cast<char>(length >> 8);
  return out + dict + '\n';
}

NpyHeader NpyHeader::parse(std::string_view file, const std::string& path) {
  auto error = [&](const std::string& got) {
    return Error(ErrorCode::kInvalidArgument, "the sink Npy cannot append to '" + path + "'",
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
  if (!descr.starts_with('\'') || !value_of(dict, "'fortran_order'").starts_with("False") ||
      !shape || shape->empty()) {
    throw error(std::string(dict.substr(0, dict.find_last_not_of(" \n") + 1)));
  }
  header.descr = descr.substr(1, descr.find('\'', 1) - 1);
  header.rows = static_cast<std::uint64_t>(shape->front());
  header.row.assign(shape->begin() + 1, shape->end());
  return header;
}

}  // namespace callgate
