// The thread sleeps in poll(); a pipe wakes it. Sockets never block, and never raise SIGPIPE.
#include "channel/stream_server.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "core/error.h"

namespace callgate {
namespace {

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // macOS: SO_NOSIGPIPE, below
#endif

void make_nonblocking(int fd) {
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
#ifdef SO_NOSIGPIPE
  int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

StreamServer::StreamServer(StreamAddress address, Limits limits, std::string preamble)
    : address_(std::move(address)),
      limits_(limits),
      listener_(listen_stream(address_)),
      preamble_(std::make_shared<const std::string>(std::move(preamble))) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    throw Error(ErrorCode::kInternal, "stream at '" + address_.text() + "': no pipe could be made");
  }
  wake_read_ = UniqueFd(ends[0]);
  wake_write_ = UniqueFd(ends[1]);
  make_nonblocking(ends[0]);
  make_nonblocking(ends[1]);
  thread_ = std::jthread([this] { serve(); });
}

StreamServer::~StreamServer() { close(); }

// Under the lock as a whole: a reader that connects meanwhile gets either the new preamble or the
// batch, in which new sources are described.
void StreamServer::send(const StreamBatch& batch, const std::string& preamble) {
  {
    std::lock_guard lock(mutex_);
    if (preamble != *preamble_) preamble_ = std::make_shared<const std::string>(preamble);
    if (readers_.empty()) return;
    auto chunk = std::make_shared<const std::string>(batch.flat());
    for (const auto& reader : readers_) push(*reader, chunk);
  }
  wake();
}

void StreamServer::close() {
  if (!process_.here()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (!closing_) deadline_ = std::chrono::steady_clock::now() + limits_.close_wait;
    closing_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  if (!listener_) return;
  listener_ = UniqueFd();
  if (address_.transport == StreamTransport::kUnix) unlink(address_.path.c_str());
}

// One batch may exceed the limit by itself: what counts is what lies before it.
void StreamServer::push(Reader& reader, const Chunk& chunk) const {
  if (reader.queued - reader.sent > limits_.lag_bytes) reader.gone = true;
  if (reader.gone) return;
  reader.queue.push_back(chunk);
  reader.queued += chunk->size();
}

void StreamServer::wake() {
  char byte = 0;
  // A full pipe has woken the thread already.
  [[maybe_unused]] ssize_t written = ::write(wake_write_.get(), &byte, 1);
}

void StreamServer::serve() {
#ifdef __linux__
  pthread_setname_np(pthread_self(), "callgate-serve");
#endif
  std::vector<pollfd> polled;
  while (!finished()) {
    polled.assign({{listener_.get(), POLLIN, 0}, {wake_read_.get(), POLLIN, 0}});
    int timeout = -1;
    {
      std::lock_guard lock(mutex_);
      if (closing_) timeout = 10;  // the deadline is looked at again
      for (const auto& reader : readers_) {
        auto events = static_cast<short>(reader->queue.empty() ? POLLIN : POLLIN | POLLOUT);
        polled.push_back({reader->fd.get(), events, 0});
      }
    }
    poll(polled.data(), static_cast<nfds_t>(polled.size()), timeout);
    std::array<char, 256> woken{};
    while (::read(wake_read_.get(), woken.data(), woken.size()) > 0) {
    }
    std::lock_guard lock(mutex_);
    // Only this thread adds and removes readers, so they are those that were polled.
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      if ((polled[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) != 0) drain_input(*readers_[i]);
      pump(*readers_[i]);
    }
    std::erase_if(readers_, [](const auto& reader) { return reader->gone; });
    if (polled[0].revents != 0) accept_all();
  }
}

// When closing: whether everything has been sent, or the time for that is over.
bool StreamServer::finished() {
  std::lock_guard lock(mutex_);
  if (!closing_) return false;
  bool sent = std::all_of(readers_.begin(), readers_.end(),
                          [](const auto& reader) { return reader->queue.empty(); });
  if (!sent && std::chrono::steady_clock::now() < deadline_) return false;
  readers_.clear();
  return true;
}

void StreamServer::accept_all() {
  for (;;) {
    UniqueFd fd(accept(listener_.get(), nullptr, nullptr));
    if (!fd) return;
    make_nonblocking(fd.get());
    auto reader = std::make_unique<Reader>();
    reader->fd = std::move(fd);
    push(*reader, preamble_);
    pump(*reader);
    readers_.push_back(std::move(reader));
  }
}

// Sends as much as the socket takes.
void StreamServer::pump(Reader& reader) {
  while (!reader.gone && !reader.queue.empty()) {
    const std::string& chunk = *reader.queue.front();
    ssize_t sent = ::send(reader.fd.get(), chunk.data() + reader.sent, chunk.size() - reader.sent,
                          MSG_NOSIGNAL);
    if (sent < 0 && would_block()) return;
    if (sent < 0) reader.gone = true;
    if (sent <= 0) return;
    reader.sent += static_cast<std::size_t>(sent);
    if (reader.sent != chunk.size()) continue;
    reader.queued -= chunk.size();
    reader.sent = 0;
    reader.queue.pop_front();
  }
}

// Readers have nothing to say, but their end of the connection shows here.
void StreamServer::drain_input(Reader& reader) {
  std::array<char, 256> ignored{};
  // NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): the socket never blocks
  ssize_t got = ::recv(reader.fd.get(), ignored.data(), ignored.size(), 0);
  if (got == 0 || (got < 0 && !would_block())) reader.gone = true;
}

}  // namespace callgate
