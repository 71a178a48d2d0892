// Makes the frames of include/callgate/stream.h, where the format stands byte by byte.
//
// Belongs to one thread at a time. Small payloads are copied behind their headers; large ones are
// left where they are and named in the batch, so that writing them to a file copies nothing. Frames
// are built in place at the end of the batch: header and fields, payload, then the checksums.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "callgate/stream.h"
#include "channel/record.h"
#include "core/error.h"

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
  std::size_t outside = 0;           // bytes of the externals
  std::vector<std::size_t> records;  // where each ends, of all bytes

  void clear() noexcept {
    bytes.clear();
    externals.clear();
    outside = 0;
    records.clear();
  }
  std::size_t size() const noexcept { return bytes.size() + outside; }

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

  // Everything in one piece.
  std::string flat() const {
    std::string whole;
    whole.reserve(size());
    each_piece([&](const char* data, std::size_t count) { whole.append(data, count); });
    return whole;
  }
};

// A frame at the end of `out`, whose header's checksums seal() fills in.
class StreamFrame {
 public:
  StreamFrame(std::string& out, char kind)
      : out_(out), start_(out.size()), summed_(start_ + stream::kHeaderBytes) {
    out.append("cgs").push_back(kind);
    out.append(stream::kHeaderBytes - 4, '\0');
  }

  // Appends numbers, each with the bytes of its type.
  template <typename... T>
  void put(T... values) {
    static_assert(std::endian::native == std::endian::little, "the format is written as it lies");
    (out_.append(reinterpret_cast<const char*>(&values), sizeof(T)), ...);
  }
  void put_sizes(auto... sizes) { put(static_cast<std::uint32_t>(sizes)...); }
  void put_padded(std::string_view text) {
    out_.append(text).append(stream::pad8(text.size()) - text.size(), '\0');
  }

  // Bytes that are part of the frame, padded, and stay where they are.
  void put_outside(std::string_view bytes, StreamBatch& batch) {
    sum_up();
    crc_ = stream::crc32c(bytes.data(), bytes.size(), crc_);
    batch.externals.push_back({out_.size(), bytes.data(), bytes.size()});
    batch.outside += bytes.size();
    outside_ += bytes.size();
    out_.append(stream::pad8(bytes.size()) - bytes.size(), '\0');
  }

  void seal() {
    sum_up();
    char* head = out_.data() + start_;
    const std::uint64_t length = out_.size() - start_ + outside_;
    std::memcpy(head + 4, &crc_, sizeof(crc_));
    std::memcpy(head + 8, &length, sizeof(length));
    const std::uint32_t head_crc = stream::crc32c(head, 20);
    std::memcpy(head + 20, &head_crc, sizeof(head_crc));
  }

 private:
  // Takes what has been put into the body's checksum.
  void sum_up() {
    crc_ = stream::crc32c(out_.data() + summed_, out_.size() - summed_, crc_);
    summed_ = out_.size();
  }

  std::string& out_;
  const std::size_t start_;
  std::size_t summed_, outside_ = 0;
  std::uint32_t crc_ = 0;
};

class StreamEncoder {
 public:
  // `process_index` is that of this process among those of its program, -1 when it is not known.
  explicit StreamEncoder(std::int32_t process_index = -1) : process_index_(process_index) {}

  // Begins a session: the sources are forgotten, and described again before their next record.
  void start(StreamBatch& batch) {
    numbers_.clear();
    preamble_.clear();
    records_ = 0;
    StreamFrame frame(preamble_, 'S');
    frame.put(stream::kVersion, static_cast<std::uint32_t>(getpid()), wall_time_ns(),
              process_index_, std::uint32_t{0});
    frame.seal();
    batch.bytes.append(preamble_);
  }

  // The record, after the description of its source if the session has none. Where it throws, an
  // Error for a source that no reader would take, the batch is as it was.
  void add(const Record& record, StreamBatch& batch) {
    const std::uint32_t number = number_of(*record.source, batch);
    const std::size_t bytes = batch.bytes.size(), externals = batch.externals.size();
    const std::size_t outside = batch.outside;
    try {
      append(record, number, batch);
      batch.records.push_back(batch.size());
    } catch (...) {  // no half of a frame
      batch.bytes.resize(bytes);
      batch.externals.resize(externals);
      batch.outside = outside;
      throw;
    }
    ++records_;
  }

  // Ends the session.
  void finish(StreamBatch& batch) {
    StreamFrame frame(batch.bytes, 'E');
    frame.put(records_, wall_time_ns());
    frame.seal();
  }

  // What a reader has to know that joins now: the session's frame and all descriptions.
  const std::string& preamble() const noexcept { return preamble_; }

  // The frame for a reader that is not served.
  static std::string refusal(std::string_view reason) {
    std::string out;
    StreamFrame frame(out, 'X');
    frame.put_sizes(reason.size(), 0);
    frame.put_padded(reason);
    frame.seal();
    return out;
  }

 private:
  static constexpr std::size_t kExternalBytes = 65'536;  // larger payloads are not copied

  std::uint32_t number_of(const Source& source, StreamBatch& batch) {
    const auto next = static_cast<std::uint32_t>(numbers_.size());
    auto [entry, is_new] = numbers_.try_emplace(source.id, next);
    if (!is_new) return entry->second;
    const std::size_t before = preamble_.size(), batched = batch.bytes.size();
    try {
      put_source(source, next);
      batch.bytes.append(preamble_, before);
    } catch (...) {  // the number is the next one's
      preamble_.resize(before);
      batch.bytes.resize(batched);
      numbers_.erase(entry);
      throw;
    }
    return next;
  }

  void put_source(const Source& source, std::uint32_t number) {
    // Readers refuse what is beyond (callgate/stream.h).
    const auto count = static_cast<std::uint64_t>(source.lanes.count());
    const auto most = std::max<std::uint64_t>(stream::kFreeLanes, 8 * source.payload_bytes);
    if (count > most)
      throw Error("a stream's tap '" + source.name + "'",
                  "at most " + std::to_string(most) + " lanes (a bit of its values each)",
                  std::to_string(count));
    StreamFrame frame(preamble_, 'D');
    const std::string lanes = source.lanes.text();
    frame.put(number, static_cast<std::uint8_t>(source.role),
              static_cast<std::uint8_t>(source.has_where), std::uint16_t{0}, source.id);
    frame.put_sizes(source.name.size(), source.description.size(), lanes.size(),
                    source.leaves.size(), source.value_leaves, 0);
    for (const std::string* text : {&source.name, &source.description, &lanes})
      frame.put_padded(*text);
    for (const LeafType& leaf : source.leaves) {
      const std::string_view dtype = name(leaf.dtype);
      frame.put_sizes(leaf.dtype, bits(leaf.dtype), leaf.dims.size(), dtype.size(),
                      leaf.path.size(), 0);
      for (std::int64_t dim : leaf.dims) frame.put(dim);
      frame.put_padded(dtype);
      frame.put_padded(leaf.path);
    }
    frame.seal();
  }

  void append(const Record& record, std::uint32_t number, StreamBatch& batch) const {
    StreamFrame frame(batch.bytes, 'R');
    frame.put(number, record.flags, record.seq, record.time_ns, record.run, record.device,
              std::uint32_t{0});
    for (const LeafType& leaf : record.source->leaves) {
      const std::string_view bytes(record.data(leaf), leaf.nbytes);
      if (leaf.nbytes < kExternalBytes) {
        frame.put_padded(bytes);
      } else {
        frame.put_outside(bytes, batch);
      }
    }
    frame.seal();
  }

  std::int32_t process_index_;
  std::string preamble_;
  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // by Source::id
  std::uint64_t records_ = 0;
};

}  // namespace callgate
