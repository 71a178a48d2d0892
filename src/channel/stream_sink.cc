// See the header.
#include "channel/stream_sink.h"

#include <utility>

#include "channel/sinks/consume_each.h"
#include "core/error.h"

namespace callgate {
namespace {

// What is gathered before it is written, so that a large batch needs no second copy in memory.
constexpr std::size_t kBatchBytes = std::size_t{1} << 20;

}  // namespace

StreamSink::StreamSink(std::string destination, StreamServer::Limits limits,
                       std::int32_t process_index)
    : destination_(std::move(destination)),
      limits_(limits),
      encoder_(StreamEncoder::kExternalBytes, process_index) {
  start();
}

void StreamSink::start() {
  StreamAddress address = parse_stream_address(destination_);
  if (address.transport == StreamTransport::kFile) {
    file_.emplace(address.path);
    encoder_.start(batch_);
    write();
  } else {
    encoder_.start(batch_);
    batch_.clear();  // readers get the preamble when they connect
    server_.reset();
    server_.emplace(address, limits_, encoder_.preamble());
  }
  in_session_ = true;
  closed_ = false;
}

void StreamSink::open() {
  if (closed_ && process_.here()) start();
}

StreamSink::~StreamSink() {
  FirstError().survives([&] { close(); });  // nobody is left to tell
}

void StreamSink::consume(std::span<const Record> records) {
  if (!process_.here()) return;  // the file and the readers are the parent's
  auto take = [&](const Record& record) {
    add(record);
    if (batch_.bytes.size() >= kBatchBytes) failure_.survives([&] { write(); });
  };
  auto finish = [&] {
    failure_.survives([&] { write(); });
    failure_.rethrow();
  };
  consume_each(*this, records, [&] { open(); }, take, finish);
}

void StreamSink::add(const Record& record) {
  // After a write that failed: readers may have seen nothing of it, descriptions included.
  if (!in_session_) encoder_.start(batch_);
  in_session_ = true;
  // Readers leave out the lanes whose sizes the array has not; they are lost, and said to be so.
  FirstError refused;
  if (!record.source->padded.empty()) {
    RecordViews views(*record.source);
    std::uint64_t good = 0;
    refused.survives([&] { visit_lanes(*this, views, record, [&](auto, auto) { ++good; }); });
    if (good == 0) refused.rethrow();
  }
  encoder_.add(record, batch_);
  ++in_batch_;
  refused.rethrow();
}

void StreamSink::write() {
  if (batch_.empty()) return;
  const std::uint64_t records = std::exchange(in_batch_, 0);
  std::uint64_t written = 0;
  try {
    if (file_) file_->write(batch_, written);
    if (server_) server_->send(batch_, encoder_.preamble());
    batch_.clear();
  } catch (...) {
    lose(records - written);
    batch_.clear();
    in_session_ = false;
    throw;
  }
}

void StreamSink::close() {
  if (closed_) return;
  closed_ = true;
  if (!process_.here()) {
    if (server_) server_->close();
    return;
  }
  try {
    if (in_session_) {
      encoder_.finish(batch_);
      write();
    }
  } catch (...) {
    server_.reset();
    if (file_) file_->close();
    throw;
  }
  if (file_) file_->close();
  if (server_) server_->close();
}

std::string StreamSink::address() const {
  if (file_) return file_->path();
  return server_ ? server_->address().text() : "";
}

}  // namespace callgate
