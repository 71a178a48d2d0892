// The framing in which taps left the device in 2020 (jax.experimental.host_callback's outfeed).
//
// The functions are pure, for any thread; whatever the bytes hold, nothing beyond them is read. A
// sink writes a file in the framing, and a reader reads it; each belongs to one thread at a time. A
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

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "channel/consumer.h"
#include "channel/first_error.h"
#include "channel/unique_fd.h"
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

namespace callgate {

// Writes the value leaves of each record as one message of the consumer `source.id`: whole, with
// the axes that vmap added, as taps sent them then. A record none of whose lanes is sent is left
// out. close() writes the end marker.
class Outfeed2020Sink final : public Consumer {
 public:
  // Makes the file, or empties it. Throws Error naming the path.
  explicit Outfeed2020Sink(std::string path);
  ~Outfeed2020Sink() override;

  // Throws Error for a source with a dtype that the framing lacks, after the other records.
  void consume(std::span<const Record> records) override;
  // Writes the end marker and gives the lock back; nothing in a fork's child of the process that
  // made this, whose file and lock they are.
  void close() override;
  std::string description() const override { return "outfeed of 2020 to " + path_; }

 private:
  const std::string& header_of(const Source& source);
  void add(const Record& record);
  void write();

  std::string path_;
  UniqueFd fd_;
  std::string buffer_;
  std::vector<std::size_t> ends_;                           // of the messages in it
  std::uint64_t size_ = 0;                                  // of whole messages
  std::unordered_map<std::uint64_t, std::string> headers_;  // by Source::id
  FirstError failure_;                                      // to write the batch
  bool closed_ = false;
  pid_t process_ = getpid();
};

// Reads such a file, which may still be growing.
class Outfeed2020Reader {
 public:
  struct Message {
    std::uint64_t consumer = 0;
    std::vector<outfeed_2020::ArrayType> arrays;
    std::string data;  // the arrays' bytes
    bool end = false;  // the end marker
  };

  // Throws Error naming the path.
  explicit Outfeed2020Reader(std::string path);

  // The next message; none when no whole one follows. Throws Error at what is none.
  std::optional<Message> next();

  // Where the next message begins.
  std::uint64_t offset() const noexcept { return offset_; }

 private:
  // `size` bytes from `offset`; false when the file is shorter.
  bool read(std::uint64_t offset, std::uint64_t size, std::string& bytes) const;

  std::string path_;
  UniqueFd fd_;
  std::uint64_t offset_ = 0;
};

}  // namespace callgate
