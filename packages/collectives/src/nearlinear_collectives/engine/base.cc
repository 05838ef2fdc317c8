#include "base.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nlc {

std::string format(const char *pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(static_cast<size_t>(length), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  return text;
}

std::string bytes_text(uint64_t bytes) {
  const char *units[] = {"B", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 3) value /= 1024, ++unit;
  return value == static_cast<uint64_t>(value)
             ? format("%llu %s", static_cast<unsigned long long>(value), units[unit])
             : format("%.1f %s", value, units[unit]);
}

std::string json_text(const std::string &text) {
  std::string out = "\"";
  for (const unsigned char letter : text) {
    if (letter == '"' || letter == '\\') {
      out += '\\';
      out += static_cast<char>(letter);
    } else if (letter < 0x20) {
      out += format("\\u%04x", letter);
    } else {
      out += static_cast<char>(letter);
    }
  }
  return out + '"';
}

Failure system_failure(const std::string &what) {
  return Failure(NLC_SYSTEM, what + ": " + std::strerror(errno));
}

std::string setting(const char *name) {
  const char *value = std::getenv((std::string("NEARLINEAR_COLLECTIVES_") + name).c_str());
  return value ? value : "";
}

int64_t setting_number(const char *name, int64_t otherwise) {
  const std::string value = setting(name);
  if (value.empty()) return otherwise;
  char *end = nullptr;
  const long long number = std::strtoll(value.c_str(), &end, 10);
  if (*end != '\0')
    throw Failure(
        NLC_BAD_ARGUMENT,
        format("NEARLINEAR_COLLECTIVES_%s must be a whole number, not '%s'", name, value.c_str()));
  return number;
}

}  // namespace nlc
