// The framing in which taps left the device in 2020 (jax.experimental.host_callback's outfeed).
//
// Pure functions on bytes, any thread; whatever the bytes hold, nothing beyond them is read. A
// message is a header, perhaps continued, and then the arrays' bytes, row-major, one after the
// other without padding. All words are uint32, little-endian in memory:
//
//   header, 32 words:    0      2178
//                        1, 2   consumer id, 64 bits: the high word, then the low word
//                        3      length of the metadata in bytes
//                        4-31   metadata, four bytes a word, the first in the word's highest bits;
//                               zeros behind it
//   continuation,        0-31   the next 128 bytes of the metadata, in the same way; as many blocks
//   32 words each:              as it takes. (In 2020 the metadata ended with the header's words.)
//
// The metadata is msgpack: [(dtype code, [dims, ...]), ...], one entry an array. Codes 0 to 11 are
// int8 to int64, uint8 to uint64, float16, float32, float64 and bfloat16; 12 to 14, of later years,
// are bool, complex64 and complex128. Consumer 0 without arrays marks the end of the stream: its
// metadata is empty here, and may also be an empty msgpack array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace callgate::outfeed_2020 {

inline constexpr std::uint32_t kStart = 2178;
inline constexpr std::size_t kBlockBytes = 128;
inline constexpr std::size_t kFirstMetadataBytes = 112;

struct ArrayType {
  DType dtype = DType::kInvalid;
  std::vector<std::int64_t> dims;

  // Throws Error when no memory could hold as much.
  std::size_t nbytes() const;
  bool operator==(const ArrayType&) const = default;
};

// None for dtypes that the framing lacks.
std::optional<std::uint32_t> code_of(DType dtype) noexcept;
std::optional<DType> dtype_of(std::uint64_t code) noexcept;

// Throw Error on a dtype without a code, and on bytes that are no such metadata.
std::string encode_metadata(std::span<const ArrayType> arrays);
std::vector<ArrayType> decode_metadata(std::string_view metadata);

// The header with its continuations.
std::string encode_header(std::uint64_t consumer, std::string_view metadata);

struct Header {
  std::uint64_t consumer = 0;
  std::uint32_t metadata_bytes = 0;

  // Of the header and its continuations.
  std::size_t size() const noexcept;
};

// Of the first block, which is at least kBlockBytes. Throws Error when it is no header.
Header decode_header(std::string_view block);

// The metadata out of the `header.size()` bytes of the header and its continuations.
std::string metadata_of(const Header& header, std::string_view blocks);

}  // namespace callgate::outfeed_2020
