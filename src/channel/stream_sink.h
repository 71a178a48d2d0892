// SPDX-License-Identifier: Apache-2.0
// A consumer that writes records in the format of include/callgate/stream.h, where it stands byte
// by byte: to a file, or to those who read from a socket.
//
// A file is appended to in one system call a batch; a socket's readers are served by a thread of
// their own and never hold up the channel (stream_server.h). What another process reads is what was
// consumed: nothing is buffered beyond a call. Small payloads are copied behind their headers;
// large ones are left where they are and named in the batch, so that writing them to a file copies
// nothing.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "callgate/stream.h"
#include "channel/consumer.h"
#include "channel/record.h"
#include "channel/sinks/file.h"
#include "channel/stream_address.h"
#include "channel/stream_server.h"
#include "core/error.h"
#include "core/lifetime.h"

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

  // Where all of it lies, in order.
  std::vector<iovec> pieces() const {
    std::vector<iovec> pieces;
    auto add = [&](const char* data, std::size_t count) {
      if (count != 0) pieces.push_back({const_cast<char*>(data), count});  // it has no const form
    };
    std::size_t from = 0;
    for (const External& external : externals) {
      add(bytes.data() + from, external.position - from);
      add(external.data, external.size);
      from = external.position;
    }
    add(bytes.data() + from, bytes.size() - from);
    return pieces;
  }

  std::string flat() const {
    std::string whole;
    whole.reserve(size());
    for (const iovec& piece : pieces())
      whole.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
    return whole;
  }
};

// A frame at the end of `out`. Its end fills the header's checksums in.
class StreamFrame : Immovable {
 public:
  StreamFrame(std::string& out, char kind)
      : out_(out), start_(out.size()), summed_(start_ + stream::kHeaderBytes) {
    out.append("cgs").push_back(kind);
    out.append(stream::kHeaderBytes - 4, '\0');
  }
  ~StreamFrame() {
    sum_up();
    char* head = out_.data() + start_;
    const std::uint64_t length = out_.size() - start_ + outside_;
    std::memcpy(head + 4, &crc_, sizeof(crc_));
    std::memcpy(head + 8, &length, sizeof(length));
    const std::uint32_t head_crc = stream::crc32c(head, 20);
    std::memcpy(head + 20, &head_crc, sizeof(head_crc));
  }

  // Appends numbers, each with the bytes of its type.
  template <typename... T>
  StreamFrame& put(T... values) {
    static_assert(std::endian::native == std::endian::little, "the format is written as it lies");
    (out_.append(reinterpret_cast<const char*>(&values), sizeof(T)), ...);
    return *this;
  }
  StreamFrame& put_sizes(auto... sizes) { return put(static_cast<std::uint32_t>(sizes)...); }
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
    StreamFrame(preamble_, 'S')
        .put(stream::kVersion, static_cast<std::uint32_t>(getpid()), wall_time_ns(), process_index_,
             std::uint32_t{0});
    batch.bytes.append(preamble_);
  }

  // The record, after the description of its source if the session has none. Where it throws, an
  // Error for a source that no reader would take, the batch is as it was.
  void add(const Record& record, StreamBatch& batch) {
    const std::uint32_t number = number_of(*record.source, batch);
    const std::size_t externals = batch.externals.size(), outside = batch.outside;
    try {
      append_whole(batch.bytes, [&] {
        append(record, number, batch);
        batch.records.push_back(batch.size());
      });
    } catch (...) {  // no half of a frame
      batch.externals.resize(externals);
      batch.outside = outside;
      throw;
    }
    ++records_;
  }

  void finish(StreamBatch& batch) { StreamFrame(batch.bytes, 'E').put(records_, wall_time_ns()); }

  // What a reader has to know that joins now: the session's frame and all descriptions.
  const std::string& preamble() const noexcept { return preamble_; }

  // The frame for a reader that is not served.
  static std::string refusal(std::string_view reason) {
    std::string out;
    StreamFrame(out, 'X').put_sizes(reason.size(), 0).put_padded(reason);
    return out;
  }

 private:
  static constexpr std::size_t kExternalBytes = 65'536;  // larger payloads are not copied

  std::uint32_t number_of(const Source& source, StreamBatch& batch) {
    if (auto found = numbers_.find(source.id); found != numbers_.end()) return found->second;
    const auto next = static_cast<std::uint32_t>(numbers_.size());
    const std::size_t before = preamble_.size();
    append_whole(preamble_, [&] {
      put_source(source, next);
      append_whole(batch.bytes, [&] {
        batch.bytes.append(preamble_, before);
        numbers_.emplace(source.id, next);
      });
    });
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
  }

  std::int32_t process_index_;
  std::string preamble_;
  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // by Source::id
  std::uint64_t records_ = 0;
};

// The file that a stream is appended to. Belongs to one thread at a time.
//
// One writer a file: it has the place (sinks/file.h) until it ends. What an earlier writer left
// incomplete at the end is cut off when the file is opened; a file that is no stream, or is damaged
// before its end, is refused and left as it is.
class StreamFile : public UnitFile {
 public:
  // Opens or makes it. Throws Error naming the path.
  explicit StreamFile(const std::string& path)
      : UnitFile("the stream", path, {.mode = FileMode::kAppend, .makes_folders = false}) {
    if (!regular()) return;  // a device or a named pipe is only written to
    claim();
    // Zeros could be the beginning of a stream after a power loss: the reader says.
    if (!std::string_view("cgsS").starts_with(read_at(0, 4).c_str()))
      throw Error("stream file '" + path + "'", "a new file or a stream to append to",
                  "a file of another kind");
    try {
      stream::Reader reader(path);
      while (reader.next()) {
      }
      begin_at(reader.offset());
    } catch (const std::exception& error) {
      throw Error(ErrorCode::kInvalidArgument,
                  "stream file '" + path + "': can't be appended to: " + error.what());
    }
  }
};

class StreamSink final : public Sink {
 public:
  // `destination`: a file's path (appended to), unix:PATH or tcp://HOST:PORT (see
  // stream_address.h). Throws Error naming it: a bad path, a port that is taken, a damaged file.
  // `process_index` goes into the stream, for readers that merge several: -1 when it is not known.
  explicit StreamSink(std::string destination, StreamServer::Limits limits = {},
                      std::int32_t process_index = -1)
      : destination_(std::move(destination)), limits_(limits), encoder_(process_index) {
    start();
  }
  ~StreamSink() override {
    FirstError().survives([&] { close(); });  // nobody is left to tell
  }

  // A closed one goes on: at the end of its file, or at its address.
  void open() override {
    if (closed_ && process_.here()) start();
  }

  void consume(std::span<const Record> records) override {
    if (process_.here()) Sink::consume(records);  // the file and the readers are the parent's
  }

  // Others may write to the file from now on. In a fork's child both are the parent's.
  void close() override {
    if (std::exchange(closed_, true)) return;
    FirstError errors;
    auto finish = [&] {
      encoder_.finish(batch_);
      write();
    };
    if (process_.here() && in_session_) errors.survives(finish);
    file_.reset();
    if (server_) server_->close();
    errors.rethrow();
  }

  std::string description() const override { return "stream to " + address(); }

  // The destination, with the port in use for port 0.
  std::string address() const { return server_ ? server_->address().text() : destination_; }

 private:
  void start() {
    const StreamAddress address = parse_stream_address(destination_);
    if (address.transport == StreamTransport::kFile) {
      file_.emplace(address.path);
      encoder_.start(batch_);
      write();
    } else {
      encoder_.start(batch_);
      batch_.clear();  // readers get the preamble when they connect
      server_.reset();
      server_.emplace(address, limits_, encoder_.preamble(), &StreamEncoder::refusal);
    }
    in_session_ = true;
    closed_ = false;
  }

  void begin() override { open(); }

  void take(const Record& record) override {
    // After a write that failed: readers may have seen nothing of it, descriptions included.
    if (!in_session_) encoder_.start(batch_);
    in_session_ = true;
    // Readers leave out the lanes whose sizes the array has not; they are lost, and said to be so.
    FirstError refused;
    if (!record.source->padded.empty()) {
      RecordViews views(*record.source);
      std::uint64_t good = 0;
      refused.survives([&] { visit_lanes(views, record, [&](auto, auto) { ++good; }); });
      if (good == 0) refused.rethrow();
    }
    encoder_.add(record, batch_);
    if (batch_.bytes.size() >= kManyBytes) write_now();  // a large batch needs no second copy
    refused.rethrow();
  }

  void write() override {
    if (batch_.size() == 0) return;
    std::size_t written = 0;
    FirstError error;
    const bool done = error.survives([&] {
      if (file_) {
        std::vector<iovec> pieces = batch_.pieces();
        file_->append(pieces, batch_.records, written);
      }
      if (server_) server_->send([&] { return batch_.flat(); }, encoder_.preamble());
    });
    if (!done) lose(batch_.records.size() - written);
    in_session_ = in_session_ && done;
    batch_.clear();
    error.rethrow();
  }

  std::string destination_;
  StreamServer::Limits limits_;
  StreamEncoder encoder_;
  StreamBatch batch_;
  std::optional<StreamFile> file_;  // one of the two
  std::optional<StreamServer> server_;
  bool in_session_ = false;
  bool closed_ = false;
  OfProcess process_;
};

}  // namespace callgate
