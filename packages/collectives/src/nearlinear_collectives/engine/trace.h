// The flight recorder: the last operations of this process over all groups, for the moment when
// something hangs.
#pragma once

#include <string>

#include "segment.h"

namespace nlc {

// Records one call from construction on; still "running" until done() or failed().
class Trace {
 public:
  Trace(const std::string &group, const CallCard &call);
  void done(const char *path);
  void failed(const std::string &why);

 private:
  uint64_t index_;
};

std::string trace_json();
const char *kind_name(int kind);

}  // namespace nlc
