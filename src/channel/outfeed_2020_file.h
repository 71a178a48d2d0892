// Files in the framing of 2020 (outfeed_2020.h): a consumer that writes one, and its reader.
//
// Each belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "channel/consumer.h"
#include "channel/outfeed_2020.h"
#include "channel/unique_fd.h"

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
  void close() override;
  std::string description() const override { return "outfeed of 2020 to " + path_; }

 private:
  const std::string& header_of(const Source& source);
  void add(const Record& record);
  void write();
  void write_out() noexcept;

  std::string path_;
  UniqueFd fd_;
  std::string buffer_;
  std::vector<std::size_t> ends_;                           // of the messages in it
  std::uint64_t size_ = 0;                                  // of whole messages
  std::unordered_map<std::uint64_t, std::string> headers_;  // by Source::id
  std::exception_ptr failure_;                              // the batch's first to write
  bool closed_ = false;
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
