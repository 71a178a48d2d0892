// SPDX-License-Identifier: Apache-2.0
// See the header.
#include "system_faults.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>

namespace callgate::fake {
namespace {

thread_local SystemFault* t_fault = nullptr;

}  // namespace

SystemFault::SystemFault(Calls calls, std::size_t nth, int error)
    : calls_(calls), nth_(nth), error_(error) {
  t_fault = this;
}

SystemFault::~SystemFault() { t_fault = nullptr; }

bool SystemFault::strikes(Calls calls) noexcept {
  if (t_fault == nullptr || t_fault->calls_ != calls || t_fault->met_++ != t_fault->nth_)
    return false;
  errno = t_fault->error_;
  return true;
}

namespace {

constexpr auto kWrite = SystemFault::Calls::kWrite, kOpen = SystemFault::Calls::kOpen;

// The functions that would have been called.
struct Real {
  using Open = int(const char*, int, mode_t);

  template <typename Function>
  static Function* next(Function* /*type*/, const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
  }

  decltype(&::write) write = next(&::write, "write");
  decltype(&::pwrite) pwrite = next(&::pwrite, "pwrite");
  decltype(&::writev) writev = next(&::writev, "writev");
  decltype(&::ftruncate) ftruncate = next(&::ftruncate, "ftruncate");
  Open* open = next(static_cast<Open*>(nullptr), "open");
  decltype(&::socket) socket = next(&::socket, "socket");
  decltype(&::pipe) pipe = next(&::pipe, "pipe");
};

const Real& real() {
  static const Real functions;
  return functions;
}

// Looked up before a signal handler may write: dlsym() is not for those.
[[maybe_unused]] const Real& looked_up = real();

}  // namespace
}  // namespace callgate::fake

namespace fake = callgate::fake;

extern "C" {

ssize_t write(int fd, const void* data, std::size_t size) {
  return fake::SystemFault::strikes(fake::kWrite) ? -1 : fake::real().write(fd, data, size);
}

ssize_t pwrite(int fd, const void* data, std::size_t size, off_t offset) {
  return fake::SystemFault::strikes(fake::kWrite) ? -1
                                                  : fake::real().pwrite(fd, data, size, offset);
}

ssize_t writev(int fd, const iovec* pieces, int count) {
  return fake::SystemFault::strikes(fake::kWrite) ? -1 : fake::real().writev(fd, pieces, count);
}

int ftruncate(int fd, off_t size) noexcept {
  return fake::SystemFault::strikes(fake::kWrite) ? -1 : fake::real().ftruncate(fd, size);
}

int open(const char* path, int flags, ...) {
  std::va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return fake::SystemFault::strikes(fake::kOpen) ? -1 : fake::real().open(path, flags, mode);
}

int socket(int domain, int type, int protocol) noexcept {
  return fake::SystemFault::strikes(fake::kOpen) ? -1 : fake::real().socket(domain, type, protocol);
}

int pipe(int* ends) noexcept {
  return fake::SystemFault::strikes(fake::kOpen) ? -1 : fake::real().pipe(ends);
}

}  // extern "C"
