// The thread sleeps in poll(); a pipe wakes it. Sockets never block, and never raise SIGPIPE. What
// send() hands over waits in a queue under the mutex, from which the thread takes it all at once.
#include "channel/stream_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "core/error.h"

namespace callgate {
namespace {

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // macOS: SO_NOSIGPIPE, by make_nonblocking()
#endif

constexpr int kAcceptsAtOnce = 64;  // before the readers that there are get their turn
constexpr auto kRest = std::chrono::milliseconds(100);  // when nobody can be accepted

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

StreamServer::StreamServer(StreamAddress address, Limits limits, std::string preamble)
    : address_(std::move(address)),
      limits_(limits),
      listener_(listen_stream(address_)),
      preamble_(std::make_shared<const std::string>(std::move(preamble))) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0)
    throw Error(ErrorCode::kInternal,
                "stream at '" + address_.text() + "': making a pipe: " + std::strerror(errno));
  wake_read_ = UniqueFd(ends[0]);
  wake_write_ = UniqueFd(ends[1]);
  make_nonblocking(ends[0]);
  make_nonblocking(ends[1]);
  reserve_ = UniqueFd(fcntl(listener_.get(), F_DUPFD_CLOEXEC, 0));
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
  reserve_ = UniqueFd();  // the same socket
  listener_ = UniqueFd();
  if (address_.transport == StreamTransport::kUnix) unlink(address_.path.c_str());
}

// One batch may exceed the limit by itself: what counts is what lies before it. The mutex is held.
void StreamServer::push(Reader& reader, const Chunk& chunk) const {
  if (reader.behind.load(std::memory_order_relaxed) > limits_.lag_bytes) reader.lags = true;
  if (reader.lags) return;
  reader.pending.push_back(chunk);
  reader.behind.fetch_add(chunk->size(), std::memory_order_relaxed);
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
  while (serve_once()) {
  }
  std::lock_guard lock(mutex_);
  readers_.clear();
}

// False when all is sent that a closing server sends. Without memory it tries again later.
bool StreamServer::serve_once() noexcept try {
  std::optional<Clock::time_point> deadline = take_pending();
  for (const auto& reader : readers_) pump(*reader);
  drop_gone();
  auto sent = [](const auto& reader) { return reader->sending.empty(); };
  if (deadline && (std::ranges::all_of(readers_, sent) || Clock::now() >= *deadline)) return false;
  wait(deadline.has_value());
  return true;
} catch (const std::bad_alloc&) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

// Takes over what send() has left. Returns until when to send, if the server closes.
std::optional<StreamServer::Clock::time_point> StreamServer::take_pending() {
  std::lock_guard lock(mutex_);
  for (const auto& reader : readers_) {
    if (reader->lags) reader->gone = true;
    for (; !reader->pending.empty(); reader->pending.pop_front())
      reader->sending.push_back(std::move(reader->pending.front()));
  }
  return closing_ ? std::optional(deadline_) : std::nullopt;
}

void StreamServer::drop_gone() {
  auto is_gone = [](const auto& reader) { return reader->gone; };
  if (std::ranges::none_of(readers_, is_gone)) return;
  for (const auto& reader : readers_)  // without the mutex
    if (reader->gone) reader->fd = UniqueFd();
  std::lock_guard lock(mutex_);
  std::erase_if(readers_, is_gone);
}

// Until there is something to send, room to send it, a new reader or one that has gone.
void StreamServer::wait(bool closing) {
  auto rest = std::chrono::ceil<std::chrono::milliseconds>(rests_until_ - Clock::now()).count();
  bool rests = rest > 0;
  std::vector<pollfd> polled;
  polled.reserve(readers_.size() + 2);
  polled.push_back({rests ? -1 : listener_.get(), POLLIN, 0});
  polled.push_back({wake_read_.get(), POLLIN, 0});
  for (const auto& reader : readers_) {
    auto events = static_cast<short>(reader->sending.empty() ? POLLIN : POLLIN | POLLOUT);
    polled.push_back({reader->fd.get(), events, 0});
  }
  int timeout = closing ? 10 : rests ? static_cast<int>(rest) : -1;  // the deadline is looked at
  int ready = poll(polled.data(), static_cast<nfds_t>(polled.size()), timeout);
  // As when fewer descriptors are allowed by now than there are.
  if (ready < 0 && errno != EINTR) std::this_thread::sleep_for(kRest);
  std::array<char, 256> woken{};
  while (::read(wake_read_.get(), woken.data(), woken.size()) > 0) {
  }
  if (ready <= 0) return;
  for (std::size_t i = 0; i < readers_.size(); ++i) {
    if ((polled[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) != 0) drain_input(*readers_[i]);
  }
  if (polled[0].revents == 0) return;
  drop_gone();  // their places are free
  accept_some();
}

void StreamServer::accept_some() {
  if (!reserve_) reserve_ = UniqueFd(fcntl(listener_.get(), F_DUPFD_CLOEXEC, 0));
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    UniqueFd fd(accept(listener_.get(), nullptr, nullptr));
    if (fd) {
      add_reader(std::move(fd));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if ((errno == EMFILE || errno == ENFILE) && refuse_without_descriptor()) continue;
    rests_until_ = Clock::now() + kRest;  // poll() would come back at once, for ever
    return;
  }
}

// Gives the reserve up for the reader's connection, and takes it back.
bool StreamServer::refuse_without_descriptor() {
  reserve_ = UniqueFd();
  UniqueFd fd(accept(listener_.get(), nullptr, nullptr));
  bool accepted = static_cast<bool>(fd);
  if (accepted) refuse(fd, "the process that serves it has no file descriptor left");
  fd = UniqueFd();
  reserve_ = UniqueFd(fcntl(listener_.get(), F_DUPFD_CLOEXEC, 0));
  return accepted && reserve_;
}

void StreamServer::add_reader(UniqueFd fd) {
  make_nonblocking(fd.get());
  std::size_t most = most_readers();
  if (readers_.size() >= most) {
    refuse(fd, "it has " + std::to_string(readers_.size()) + " readers, and serves at most " +
                   std::to_string(most));
    return;
  }
  int on = 1;  // a record is not to wait for the next one
  if (address_.transport == StreamTransport::kTcp)
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  auto reader = std::make_unique<Reader>();
  reader->fd = std::move(fd);
  std::lock_guard lock(mutex_);
  push(*reader, preamble_);
  readers_.push_back(std::move(reader));
}

std::size_t StreamServer::most_readers() const {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return limits_.readers;
  return std::min(limits_.readers, std::max<std::size_t>(limit.rlim_cur / 4, 1));
}

// The connection's only frame; what it doesn't take at once is lost, and the reader sees the end.
void StreamServer::refuse(const UniqueFd& fd, std::string_view reason) {
  make_nonblocking(fd.get());
  std::string frame = refusal_frame(reason);
  [[maybe_unused]] ssize_t sent = ::send(fd.get(), frame.data(), frame.size(), MSG_NOSIGNAL);
}

// Sends as much as the socket takes.
void StreamServer::pump(Reader& reader) {
  while (!reader.gone && !reader.sending.empty()) {
    const std::string& chunk = *reader.sending.front();
    ssize_t sent = ::send(reader.fd.get(), chunk.data() + reader.sent, chunk.size() - reader.sent,
                          MSG_NOSIGNAL);
    if (sent < 0 && would_block()) return;
    if (sent < 0) reader.gone = true;
    if (sent <= 0) return;
    reader.sent += static_cast<std::size_t>(sent);
    reader.behind.fetch_sub(static_cast<std::size_t>(sent), std::memory_order_relaxed);
    if (reader.sent != chunk.size()) continue;
    reader.sent = 0;
    reader.sending.pop_front();
  }
}

// Readers have nothing to say, but their end of the connection shows here.
void StreamServer::drain_input(Reader& reader) {
  std::array<char, 256> ignored{};
  ssize_t got = ::recv(reader.fd.get(), ignored.data(), ignored.size(), 0);
  if (got == 0 || (got < 0 && !would_block())) reader.gone = true;
}

}  // namespace callgate
