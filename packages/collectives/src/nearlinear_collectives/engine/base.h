// Basics of every file of the engine: errors, text formatting, owned file descriptors.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "nearlinear_collectives.h"

namespace nlc {

// An error to be returned by the C interface.
struct Failure : std::runtime_error {
  Failure(nlc_status status, const std::string &text) : std::runtime_error(text), status(status) {}
  nlc_status status;
};

std::string format(const char *pattern, ...) __attribute__((format(printf, 1, 2)));
std::string bytes_text(uint64_t bytes);           // "4 MiB", "1.5 KiB", "12 B"
std::string json_text(const std::string &text);   // quoted and escaped
Failure system_failure(const std::string &what);  // NLC_SYSTEM with errno's text

// Return the environment variable NEARLINEAR_COLLECTIVES_<name>, or "".
std::string setting(const char *name);
int64_t setting_number(const char *name, int64_t otherwise);

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd &operator=(Fd &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

using Clock = std::chrono::steady_clock;
inline Clock::time_point after_ms(int64_t ms) {
  return Clock::now() + std::chrono::milliseconds(ms);
}

}  // namespace nlc
