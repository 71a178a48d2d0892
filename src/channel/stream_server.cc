// SPDX-License-Identifier: Apache-2.0
// The stream server's thread: it accepts readers, sends, and drops slow readers.
#include "channel/stream_server.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

namespace callgate {

StreamServer::StreamServer(StreamAddress address, Limits limits, std::string preamble,
                           Refusal* refusal)
    : address_(std::move(address)),
      limits_(limits),
      refusal_(refusal),
      listener_(listen_stream(address_)),
      preamble_(std::make_shared<const std::string>(std::move(preamble))) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) address_.fail("making a pipe");
  wake_read_ = UniqueFd(ends[0]);
  wake_write_ = UniqueFd(ends[1]);
  for (int end : ends) make_nonblocking(end);
  take_reserve();
  thread_ = std::jthread([this] { serve(); });
}

void StreamServer::close() {
  if (!process_.here()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (!deadline_) deadline_ = Clock::now() + limits_.close_wait;
    wake();
  }
  if (thread_.joinable()) thread_.join();
  if (!listener_) return;
  reserve_ = UniqueFd();  // the same socket
  listener_ = UniqueFd();
  if (address_.transport == StreamTransport::kUnix) unlink(address_.path.c_str());
}

void StreamServer::push(Reader& reader, const Chunk& chunk) const {
  if (reader.behind.load(std::memory_order_relaxed) > limits_.lag_bytes) reader.lags = true;
  if (reader.lags) return;
  reader.pending.push_back(chunk);
  reader.behind.fetch_add(chunk->size(), std::memory_order_relaxed);
}

void StreamServer::wake() {
  char byte = 0;
  // A full pipe has already woken the thread.
  [[maybe_unused]] ssize_t written = ::write(wake_write_.get(), &byte, 1);
}

void StreamServer::serve() {
  name_thread("callgate-serve");
  while (serve_once()) {
  }
  std::lock_guard lock(mutex_);
  readers_.clear();
}

bool StreamServer::serve_once() noexcept try {
  const std::optional<Clock::time_point> deadline = take_pending();
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

std::optional<StreamServer::Clock::time_point> StreamServer::take_pending() {
  std::lock_guard lock(mutex_);
  for (const auto& reader : readers_) {
    if (reader->lags) reader->gone = true;
    for (; !reader->pending.empty(); reader->pending.pop_front())
      reader->sending.push_back(std::move(reader->pending.front()));
  }
  return deadline_;
}

void StreamServer::drop_gone() {
  for (const auto& reader : readers_)  // without the mutex
    if (reader->gone) reader->fd = UniqueFd();
  std::lock_guard lock(mutex_);
  std::erase_if(readers_, [](const auto& reader) { return reader->gone; });
}

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
  int timeout = closing ? 10 : rests ? static_cast<int>(rest) : -1;  // the deadline is checked
  int ready = poll(polled.data(), static_cast<nfds_t>(polled.size()), timeout);
  // As if the limit of descriptors were lower than the number in use.
  if (ready < 0 && errno != EINTR) std::this_thread::sleep_for(kRest);
  std::array<char, 256> ignored{};
  while (::read(wake_read_.get(), ignored.data(), ignored.size()) > 0) {
  }
  if (ready <= 0) return;
  for (std::size_t i = 0; i < readers_.size(); ++i) {
    if ((polled[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
    // Readers send nothing, but the end of the connection shows here.
    ssize_t got = ::recv(readers_[i]->fd.get(), ignored.data(), ignored.size(), 0);
    if (got == 0 || (got < 0 && !would_block())) readers_[i]->gone = true;
  }
  if (polled[0].revents == 0) return;
  drop_gone();  // frees their places
  accept_some();
}

void StreamServer::accept_some() {
  if (!reserve_) take_reserve();
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    UniqueFd fd(accept(listener_.get(), nullptr, nullptr));
    if (fd) {
      add_reader(std::move(fd));
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if ((errno == EMFILE || errno == ENFILE) && refuse_without_descriptor()) continue;
    rests_until_ = Clock::now() + kRest;  // otherwise poll() would return at once, for ever
    return;
  }
}

bool StreamServer::refuse_without_descriptor() {
  reserve_ = UniqueFd();
  UniqueFd fd(accept(listener_.get(), nullptr, nullptr));
  const bool accepted = static_cast<bool>(fd);
  if (accepted) refuse(fd, "the writer's process has no file descriptor left");
  fd = UniqueFd();
  take_reserve();
  return accepted && reserve_;
}

void StreamServer::add_reader(UniqueFd fd) {
  make_nonblocking(fd.get());
  std::size_t most = limits_.readers;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
    most = std::min(most, std::max<std::size_t>(limit.rlim_cur / 4, 1));
  if (readers_.size() >= most)
    return refuse(fd, "there are already " + std::to_string(readers_.size()) +
                          " readers, of at most " + std::to_string(most));
  int on = 1;  // a record doesn't wait for the next one
  if (address_.transport == StreamTransport::kTcp)
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  auto reader = std::make_unique<Reader>();
  reader->fd = std::move(fd);
  std::lock_guard lock(mutex_);
  push(*reader, preamble_);
  readers_.push_back(std::move(reader));
}

void StreamServer::refuse(const UniqueFd& fd, std::string_view reason) const {
  make_nonblocking(fd.get());
  const std::string frame = refusal_(reason);
  [[maybe_unused]] ssize_t sent = ::send(fd.get(), frame.data(), frame.size(), kNoSignal);
}

void StreamServer::pump(Reader& reader) {
  while (!reader.gone && !reader.sending.empty()) {
    const std::string_view chunk = std::string_view(*reader.sending.front()).substr(reader.sent);
    const ssize_t sent = ::send(reader.fd.get(), chunk.data(), chunk.size(), kNoSignal);
    if (sent < 0 && would_block()) return;
    if (sent < 0) reader.gone = true;
    if (sent <= 0) return;
    reader.sent += static_cast<std::size_t>(sent);
    reader.behind.fetch_sub(static_cast<std::size_t>(sent), std::memory_order_relaxed);
    if (static_cast<std::size_t>(sent) != chunk.size()) continue;
    reader.sent = 0;
    reader.sending.pop_front();
  }
}

}  // namespace callgate
