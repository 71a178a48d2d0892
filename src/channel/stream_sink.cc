// SPDX-License-Identifier: Apache-2.0
// Frames of the stream, and the file or server to which they go.
#include "channel/stream_sink.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace callgate {

void StreamBatch::clear() noexcept {
  bytes.clear();
  externals.clear();
  outside = 0;
  records.clear();
}

std::vector<iovec> StreamBatch::pieces() const {
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

std::string StreamBatch::flat() const {
  std::string whole;
  whole.reserve(size());
  for (const iovec& piece : pieces())
    whole.append(static_cast<const char*>(piece.iov_base), piece.iov_len);
  return whole;
}

StreamFrame::StreamFrame(std::string& out, char kind)
    : out_(out), start_(out.size()), summed_(start_ + stream::kHeaderBytes) {
  out.append("cgs").push_back(kind);
  out.append(stream::kHeaderBytes - 4, '\0');
}

StreamFrame::~StreamFrame() {
  sum_up();
  char* head = out_.data() + start_;
  const std::uint64_t length = out_.size() - start_ + outside_;
  std::memcpy(head + 4, &crc_, sizeof(crc_));
  std::memcpy(head + 8, &length, sizeof(length));
  const std::uint32_t head_crc = stream::crc32c(head, 20);
  std::memcpy(head + 20, &head_crc, sizeof(head_crc));
}

void StreamFrame::put_outside(std::string_view bytes, StreamBatch& batch) {
  sum_up();
  crc_ = stream::crc32c(bytes.data(), bytes.size(), crc_);
  batch.externals.push_back({out_.size(), bytes.data(), bytes.size()});
  batch.outside += bytes.size();
  outside_ += bytes.size();
  out_.append(stream::pad8(bytes.size()) - bytes.size(), '\0');
}

void StreamFrame::sum_up() {
  crc_ = stream::crc32c(out_.data() + summed_, out_.size() - summed_, crc_);
  summed_ = out_.size();
}

void StreamEncoder::start(StreamBatch& batch) {
  numbers_.clear();
  preamble_.clear();
  records_ = 0;
  StreamFrame(preamble_, 'S')
      .put(stream::kVersion, static_cast<std::uint32_t>(getpid()), wall_time_ns(), process_index_,
           std::uint32_t{0});
  batch.bytes.append(preamble_);
}

void StreamEncoder::add(const Record& record, StreamBatch& batch) {
  const std::uint32_t number = number_of(*record.source, batch);
  const std::size_t externals = batch.externals.size(), outside = batch.outside;
  try {
    append_whole(batch.bytes, [&] {
      append(record, number, batch);
      batch.records.push_back(batch.size());
    });
  } catch (...) {  // no partial frame
    batch.externals.resize(externals);
    batch.outside = outside;
    throw;
  }
  ++records_;
}

std::string StreamEncoder::refusal(std::string_view reason) {
  std::string out;
  StreamFrame(out, 'X').put_sizes(reason.size(), 0).put_padded(reason);
  return out;
}

std::uint32_t StreamEncoder::number_of(const Source& source, StreamBatch& batch) {
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

void StreamEncoder::put_source(const Source& source, std::uint32_t number) {
  // Readers refuse larger ones (callgate/stream.h).
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
  frame.put_sizes(source.name.size(), source.description.size(), lanes.size(), source.leaves.size(),
                  source.value_leaves, 0);
  for (const std::string* text : {&source.name, &source.description, &lanes})
    frame.put_padded(*text);
  for (const LeafType& leaf : source.leaves) {
    const std::string_view dtype = name(leaf.dtype);
    frame.put_sizes(leaf.dtype, bits(leaf.dtype), leaf.dims.size(), dtype.size(), leaf.path.size(),
                    0);
    for (std::int64_t dim : leaf.dims) frame.put(dim);
    frame.put_padded(dtype);
    frame.put_padded(leaf.path);
  }
}

void StreamEncoder::append(const Record& record, std::uint32_t number, StreamBatch& batch) const {
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

StreamFile::StreamFile(const std::string& path)
    : UnitFile("the stream", path, {.mode = FileMode::kAppend, .makes_folders = false}) {
  if (!regular()) return;  // a device or a named pipe is only written
  claim();
  // Zeros could be the beginning of a stream after a power loss; the reader decides.
  if (!std::string_view("cgsS").starts_with(read_at(0, 4).c_str()))
    throw Error("stream file '" + path + "'", "a new file or a stream to append to",
                "another kind of file");
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

StreamSink::StreamSink(std::string destination, StreamServer::Limits limits,
                       std::int32_t process_index)
    : destination_(std::move(destination)), limits_(limits), encoder_(process_index) {
  start();
}

void StreamSink::close() {
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

void StreamSink::start() {
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

void StreamSink::take(const Record& record) {
  // After a failed write: readers may have seen none of it, including descriptions.
  if (!in_session_) encoder_.start(batch_);
  in_session_ = true;
  // Readers leave out the lanes whose sizes exceed the array; these count as lost and are reported.
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

void StreamSink::write() {
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

}  // namespace callgate
