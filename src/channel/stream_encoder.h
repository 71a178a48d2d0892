// Makes the frames of include/callgate/stream.h, where the format stands byte by byte.
//
// Belongs to one thread at a time. Small payloads are copied behind their headers; large ones are
// left where they are and named in the batch, so that writing them to a file copies nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "channel/record.h"

namespace callgate {

// Bytes to write: `bytes`, with the externals put in at their positions.
struct StreamBatch {
  struct External {
    std::size_t position = 0;  // in `bytes`
    const char* data = nullptr;
    std::size_t size = 0;
  };

  std::string bytes;
  std::vector<External> externals;

  void clear() noexcept {
    bytes.clear();
    externals.clear();
  }
  bool empty() const noexcept { return bytes.empty(); }

  // Everything in one piece.
  std::string flat() const;

  // Calls visit(data, size) for each piece, in order.
  template <typename Visit>
  void each_piece(Visit&& visit) const {
    std::size_t from = 0;
    for (const External& external : externals) {
      if (external.position != from) visit(bytes.data() + from, external.position - from);
      visit(external.data, external.size);
      from = external.position;
    }
    if (bytes.size() != from) visit(bytes.data() + from, bytes.size() - from);
  }
};

class StreamEncoder {
 public:
  static constexpr std::size_t kExternalBytes = 65'536;

  // Payloads of fewer bytes than `external_from` are copied into the batch. `process_index` is that
  // of this process among those of its program, -1 when it is not known.
  explicit StreamEncoder(std::size_t external_from = kExternalBytes,
                         std::int32_t process_index = -1)
      : external_from_(external_from), process_index_(process_index) {}

  // Begins a session: the sources are forgotten, and described again before their next record.
  void start(StreamBatch& batch);

  // The record, after the description of its source if the session has none. Where it throws, an
  // Error for a source that no reader would take, the batch is as it was.
  void add(const Record& record, StreamBatch& batch);

  // Ends the session.
  void finish(StreamBatch& batch);

  // What a reader has to know that joins now: the session's frame and all descriptions.
  const std::string& preamble() const noexcept { return preamble_; }

 private:
  std::uint32_t number_of(const Source& source, StreamBatch& batch);
  void append(const Record& record, std::uint32_t number, StreamBatch& batch) const;

  std::size_t external_from_;
  std::int32_t process_index_;
  std::string preamble_;
  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // by Source::id
  std::uint64_t records_ = 0;
};

// The frame for a reader that is not served.
std::string refusal_frame(std::string_view reason);

}  // namespace callgate
