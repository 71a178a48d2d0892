// Frames are built in place at the end of the batch: header and fields, payload, then the
// checksums.
#include "channel/stream_encoder.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "callgate/stream.h"

namespace callgate {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is written as it lies");

// Appends numbers, each with the bytes of its type.
template <typename... T>
void put(std::string& out, T... values) {
  (out.append(reinterpret_cast<const char*>(&values), sizeof(T)), ...);
}

void put_text(std::string& out, std::string_view text) {
  out.append(text);
  out.append(stream::pad8(text.size()) - text.size(), '\0');
}

std::uint32_t size32(std::size_t size) { return static_cast<std::uint32_t>(size); }

// Appends a header whose checksums seal() fills in; returns where the frame begins.
std::size_t begin_frame(std::string& out, char kind) {
  std::size_t start = out.size();
  out.append("cgs");
  out.push_back(kind);
  out.append(stream::kHeaderBytes - 4, '\0');
  return start;
}

void seal(std::string& out, std::size_t start, std::uint64_t length, std::uint32_t body_crc) {
  char* head = out.data() + start;
  std::memcpy(head + 4, &body_crc, sizeof(body_crc));
  std::memcpy(head + 8, &length, sizeof(length));
  std::uint32_t head_crc = stream::crc32c(head, 20);
  std::memcpy(head + 20, &head_crc, sizeof(head_crc));
}

// Seals a frame that lies in `out` as a whole.
void seal(std::string& out, std::size_t start) {
  const char* body = out.data() + start + stream::kHeaderBytes;
  std::size_t size = out.size() - start;
  seal(out, start, size, stream::crc32c(body, size - stream::kHeaderBytes));
}

void put_leaf(std::string& out, const LeafType& leaf) {
  std::string_view dtype = name(leaf.dtype);
  put(out, static_cast<std::uint32_t>(leaf.dtype), static_cast<std::uint32_t>(bits(leaf.dtype)),
      size32(leaf.dims.size()), size32(dtype.size()), size32(leaf.path.size()), std::uint32_t{0});
  for (std::int64_t dim : leaf.dims) put(out, dim);
  put_text(out, dtype);
  put_text(out, leaf.path);
}

// Readers refuse what is beyond (callgate/stream.h).
void check_lanes(const Source& source) {
  auto lanes = static_cast<std::uint64_t>(source.lanes.count());
  std::uint64_t most = std::max<std::uint64_t>(stream::kFreeLanes, 8 * source.payload_bytes);
  if (lanes <= most) return;
  throw Error(ErrorCode::kInvalidArgument, "a stream's tap '" + source.name + "'",
              "at most " + std::to_string(most) + " lanes (a bit of its values each)",
              std::to_string(lanes));
}

void put_source(std::string& out, const Source& source, std::uint32_t number) {
  check_lanes(source);
  std::size_t start = begin_frame(out, 'D');
  std::string lanes = source.lanes.text();
  put(out, number, static_cast<std::uint8_t>(source.role),
      static_cast<std::uint8_t>(source.has_where), std::uint16_t{0}, source.id);
  put(out, size32(source.name.size()), size32(source.description.size()), size32(lanes.size()),
      size32(source.leaves.size()), size32(source.value_leaves), std::uint32_t{0});
  put_text(out, source.name);
  put_text(out, source.description);
  put_text(out, lanes);
  for (const LeafType& leaf : source.leaves) put_leaf(out, leaf);
  seal(out, start);
}

}  // namespace

std::string StreamBatch::flat() const {
  std::size_t size = bytes.size();
  for (const External& external : externals) size += external.size;
  std::string whole;
  whole.reserve(size);
  each_piece([&](const char* data, std::size_t count) { whole.append(data, count); });
  return whole;
}

void StreamEncoder::start(StreamBatch& batch) {
  numbers_.clear();
  preamble_.clear();
  records_ = 0;
  std::size_t start = begin_frame(preamble_, 'S');
  put(preamble_, stream::kVersion, static_cast<std::uint32_t>(getpid()), wall_time_ns(),
      process_index_, std::uint32_t{0});
  seal(preamble_, start);
  batch.bytes.append(preamble_);
}

std::uint32_t StreamEncoder::number_of(const Source& source, StreamBatch& batch) {
  auto [entry, is_new] = numbers_.try_emplace(source.id, size32(numbers_.size()));
  if (!is_new) return entry->second;
  const std::size_t before = preamble_.size(), batched = batch.bytes.size();
  try {
    put_source(preamble_, source, entry->second);
    batch.bytes.append(preamble_, before);
  } catch (...) {  // the number is the next one's
    preamble_.resize(before);
    batch.bytes.resize(batched);
    numbers_.erase(entry);
    throw;
  }
  return entry->second;
}

void StreamEncoder::add(const Record& record, StreamBatch& batch) {
  const std::uint32_t number = number_of(*record.source, batch);
  const std::size_t bytes = batch.bytes.size(), externals = batch.externals.size();
  try {
    append(record, number, batch);
  } catch (...) {  // no half of a frame
    batch.bytes.resize(bytes);
    batch.externals.resize(externals);
    throw;
  }
  ++records_;
}

void StreamEncoder::append(const Record& record, std::uint32_t number, StreamBatch& batch) const {
  const Source& source = *record.source;
  std::string& out = batch.bytes;
  std::size_t start = begin_frame(out, 'R');
  put(out, number, record.flags, record.seq, record.time_ns, record.run, record.device,
      std::uint32_t{0});
  std::size_t sealed = start + stream::kHeaderBytes;  // what the checksum has taken in
  std::uint64_t outside = 0;
  std::uint32_t crc = 0;
  auto take_in = [&] {
    crc = stream::crc32c(out.data() + sealed, out.size() - sealed, crc);
    sealed = out.size();
  };
  for (const LeafType& leaf : source.leaves) {
    if (leaf.nbytes < external_from_) {
      if (leaf.nbytes != 0) out.append(record.data(leaf), leaf.nbytes);
    } else {
      take_in();
      crc = stream::crc32c(record.data(leaf), leaf.nbytes, crc);
      batch.externals.push_back({out.size(), record.data(leaf), leaf.nbytes});
      outside += leaf.nbytes;
    }
    out.append(stream::pad8(leaf.nbytes) - leaf.nbytes, '\0');
  }
  take_in();
  seal(out, start, out.size() - start + outside, crc);
}

void StreamEncoder::finish(StreamBatch& batch) {
  std::size_t start = begin_frame(batch.bytes, 'E');
  put(batch.bytes, records_, wall_time_ns());
  seal(batch.bytes, start);
}

std::string refusal_frame(std::string_view reason) {
  std::string out;
  std::size_t start = begin_frame(out, 'X');
  put(out, size32(reason.size()), std::uint32_t{0});
  put_text(out, reason);
  seal(out, start);
  return out;
}

}  // namespace callgate
