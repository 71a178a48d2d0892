// SPDX-License-Identifier: Apache-2.0
// The framing of the taps of 2020 (jax.experimental.host_callback's outfeed).
//
// The functions are pure and thread-safe, and never read beyond the given bytes. The sink and the
// reader of such a file belong to one thread at a time. A message is a header, perhaps with
// continuations, and then the arrays' bytes, row-major, one after the other without padding. All
// words are uint32, little-endian in memory:
//
//   header, 32 words:    0      2178
//                        1, 2   consumer id, 64 bits: the high word, then the low word
//                        3      length of the metadata in bytes
//                        4-31   metadata, four bytes a word, the first in the word's highest bits;
//                               zeros behind it
//   continuation,        0-31   the next 128 bytes of the metadata, in the same way; as many blocks
//   32 words each:              as needed. (In 2020 the metadata ended with the header's words.)
//
// The metadata is msgpack: [(dtype code, [dims, ...]), ...], one entry per array. Codes 0 to 11 are
// int8 to int64, uint8 to uint64, float16, float32, float64 and bfloat16. Codes 12 to 14, added in
// later years, are bool, complex64 and complex128. Consumer 0 without arrays marks the end of the
// stream: its metadata is empty here, and may also be an empty msgpack array.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "core/array_view.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate::outfeed_2020 {

inline constexpr std::uint32_t kStart = 2178;
inline constexpr std::size_t kBlockBytes = 128;
inline constexpr std::size_t kFieldBytes = 16;  // of a header, before its metadata
inline constexpr std::array kDTypes{
    // by code
    DType::kS8,  DType::kS16,  DType::kS32,  DType::kS64, DType::kU8,
    DType::kU16, DType::kU32,  DType::kU64,  DType::kF16, DType::kF32,
    DType::kF64, DType::kBF16, DType::kPred, DType::kC64, DType::kC128,
};

[[noreturn]] inline void refuse(const std::string& expected, const std::string& got) {
  throw Error("outfeed of 2020", expected, got);
}

struct ArrayType {
  DType dtype = DType::kInvalid;
  std::vector<std::int64_t> dims;

  // Throws Error if no memory could hold the array.
  std::size_t nbytes() const;
  bool operator==(const ArrayType&) const = default;
};

// Empty for dtypes that the framing lacks.
std::optional<std::uint32_t> code_of(DType dtype) noexcept;
inline std::optional<DType> dtype_of(std::uint64_t code) noexcept {
  return code < kDTypes.size() ? std::optional(kDTypes[code]) : std::nullopt;
}

// The low `count` bytes of a number, the highest first.
inline void put_big(std::string& out, std::uint64_t value, int count) {
  while (count-- > 0) out.push_back(static_cast<char>((value >> (8 * count)) & 255U));
}

// msgpack's tag, which grows with the value's width, and the value.
void put_tagged(std::string& out, unsigned tag, std::uint64_t value, int exponent);

// The shortest form of a nonnegative number.
inline void put_number(std::string& out, std::uint64_t value) {
  return value < 128 ? put_big(out, value, 1) : put_tagged(out, 0xCC, value, 0);
}
inline void put_array(std::string& out, std::size_t count) {
  return count < 16 ? put_big(out, 0x90 | count, 1) : put_tagged(out, 0xDB, count, 1);
}

// Both throw Error: for a dtype without a code, and for bytes that aren't such metadata.
std::string encode_metadata(std::span<const ArrayType> arrays);
std::vector<ArrayType> decode_metadata(std::string_view in);

struct Header {
  std::uint64_t consumer = 0;
  std::uint32_t metadata_bytes = 0;

  // The bytes of the header and its continuations.
  std::size_t size() const noexcept;
};

// The header with its continuations.
std::string encode_header(std::uint64_t consumer, std::string_view metadata);

// The header in the first block, which has at least kBlockBytes. Throws Error if there is none.
Header decode_header(std::string_view block);

// The metadata from the `header.size()` bytes of the header and its continuations.
std::string metadata_of(const Header& header, std::string_view blocks);

}  // namespace callgate::outfeed_2020

namespace callgate {

// Writes the value leaves of each record as one message of the consumer `source.id`: whole, with
// the axes that vmap added, as the taps of 2020 did. A record without sent lanes is left out. A
// record with a dtype that the framing lacks is refused. close() writes the end marker.
class Outfeed2020Sink final : public Sink {
 public:
  // Creates or empties the file. Throws Error with the path.
  explicit Outfeed2020Sink(const std::string& path);
  ~Outfeed2020Sink() override {
    FirstError().survives([&] { close(); });  // nobody is left to receive it
  }

  void consume(std::span<const Record> records) override {
    if (!closed_) Sink::consume(records);
  }

  // Writes the end marker and closes the file. In a fork's child the file is the parent's and stays
  // open.
  void close() override;

  std::string description() const override { return "outfeed of 2020 to " + file_.path(); }

 private:
  const std::string& header_of(const Source& source);

  void take(const Record& record) override;

  // Records without room are lost, and counted.
  void write() override;

  UnitFile file_;
  std::string buffer_;
  std::vector<std::size_t> ends_;                           // of its messages
  std::unordered_map<std::uint64_t, std::string> headers_;  // by Source::id
  bool closed_ = false;
  OfProcess process_;
};

// Reads such a file, which may still be growing.
class Outfeed2020Reader {
 public:
  struct Message {
    std::uint64_t consumer = 0;
    std::vector<outfeed_2020::ArrayType> arrays;
    std::string data;  // the arrays' bytes
    bool end = false;  // true for the end marker
  };

  // Throws Error with the path.
  explicit Outfeed2020Reader(std::string path)
      : file_("the outfeed file", std::move(path), {.mode = FileMode::kRead}) {}

  // The next message, or none if no whole message follows. Throws Error for malformed bytes.
  std::optional<Message> next();

  std::uint64_t offset() const noexcept { return offset_; }

 private:
  // Reads `size` bytes from `offset`; false if the file is shorter.
  bool read(std::uint64_t offset, std::uint64_t size, std::string& bytes) const;

  File file_;
  std::uint64_t offset_ = 0;
};

}  // namespace callgate
