// See the header.
#include "channel/stream_sink.h"

#include <utility>

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
  try {
    close();
  } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to tell
  }
}

void StreamSink::consume(std::span<const Record> records) {
  if (!process_.here()) return;  // the file and the readers are the parent's
  try {
    open();
  } catch (...) {
    lose(records.size());
    throw;
  }
  std::exception_ptr first;
  for (const Record& record : records) {
    try {
      add(record);
    } catch (...) {  // it does not take the others along
      lose(1);
      if (first == nullptr) first = std::current_exception();
      continue;
    }
    if (batch_.bytes.size() >= kBatchBytes) try_to_write(first);
  }
  try_to_write(first);
  if (first != nullptr) std::rethrow_exception(first);
}

void StreamSink::add(const Record& record) {
  // After a write that failed: readers may have seen nothing of it, descriptions included.
  if (!in_session_) encoder_.start(batch_);
  in_session_ = true;
  std::exception_ptr refused;
  if (!record.source->padded.empty()) refused = check_lanes(record);
  encoder_.add(record, batch_);
  ++in_batch_;
  if (refused != nullptr) std::rethrow_exception(refused);
}

// Readers leave out the lanes whose sizes the array has not; they are lost, and said to be so here.
std::exception_ptr StreamSink::check_lanes(const Record& record) {
  RecordViews views(*record.source);
  std::uint64_t good = 0;
  try {
    views.each_lane(record, [&](std::int64_t, auto) { ++good; });
  } catch (...) {
    lose(views.failed() - 1);  // consume() counts the last
    if (good == 0) throw;
    return std::current_exception();
  }
  return nullptr;
}

void StreamSink::try_to_write(std::exception_ptr& first) noexcept {
  try {
    write();
  } catch (...) {
    if (first == nullptr) first = std::current_exception();
  }
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
