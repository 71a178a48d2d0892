// SPDX-License-Identifier: Apache-2.0
// See the header.
#include "workers/process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <array>
#include <cerrno>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace callgate {
namespace {

constexpr std::size_t kSaid = 4096;  // bytes of stderr to keep

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> made;
  made.reserve(texts.size() + 1);
  for (const std::string& text : texts) made.push_back(const_cast<char*>(text.c_str()));
  made.push_back(nullptr);
  return made;
}

std::pair<Descriptor, Descriptor> make_pipe() {
  std::array<int, 2> ends{-1, -1};
#ifdef __linux__
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw system_error("a pipe to a worker process");
#else
  if (pipe(ends.data()) != 0) throw system_error("a pipe to a worker process");
  for (int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
#endif
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

struct SpawnActions : Immovable {
  SpawnActions() { posix_spawn_file_actions_init(&actions); }
  ~SpawnActions() { posix_spawn_file_actions_destroy(&actions); }
  posix_spawn_file_actions_t actions;
};

// The parent handles Ctrl-C, which a terminal sends to both. It is blocked until the worker ignores
// it.
struct SpawnAttributes : Immovable {
  SpawnAttributes() {
    posix_spawnattr_init(&attributes);
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGINT);
    posix_spawnattr_setsigmask(&attributes, &held);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  }
  ~SpawnAttributes() { posix_spawnattr_destroy(&attributes); }
  posix_spawnattr_t attributes;
};

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& command,
                           const std::vector<std::string>& environment,
                           const std::vector<int>& passed) {
  auto [read, write] = make_pipe();
  fcntl(read.get(), F_SETFL, O_NONBLOCK);
  SpawnActions actions;
  SpawnAttributes attributes;
  posix_spawn_file_actions_adddup2(&actions.actions, write.get(), STDERR_FILENO);
  // Onto itself, so the child keeps it.
  for (int number : passed) posix_spawn_file_actions_adddup2(&actions.actions, number, number);
  errno = posix_spawn(&pid_, command.front().c_str(), &actions.actions, &attributes.attributes,
                      pointers(command).data(), pointers(environment).data());
  if (errno != 0) {
    pid_ = -1;
    throw system_error("a worker process, '" + command.front() + "'");
  }
  said_ = std::move(read);
#ifdef SYS_pidfd_open
  ended_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
#endif
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0 || poll()) return;
  kill(SIGKILL);
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
}

std::optional<Ended> ChildProcess::poll() {
  if (how_) return how_;
  int status = 0;
  pid_t found = waitpid(pid_, &status, WNOHANG);
  if (found == pid_) {
    how_ = WIFSIGNALED(status) ? Ended{0, WTERMSIG(status)} : Ended{WEXITSTATUS(status), 0};
  } else if (found < 0 && errno == ECHILD) {
    how_ = Ended{-1, 0};  // another caller has waited for it
  }
  return how_;
}

void ChildProcess::kill(int signal) noexcept {
  if (!how_) (void)::kill(pid_, signal);
}

void ChildProcess::read_said() {
  std::array<char, 4096> buffer;
  while (said_.open()) {
    ssize_t count = read(said_.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return;  // no more for now
    if (count == 0) return said_.reset();
    const auto bytes = static_cast<std::size_t>(count);
    (void)!write(STDERR_FILENO, buffer.data(), bytes);
    text_.append(buffer.data(), bytes);
    if (text_.size() > kSaid) text_.erase(0, text_.size() - kSaid);
  }
}

}  // namespace callgate
