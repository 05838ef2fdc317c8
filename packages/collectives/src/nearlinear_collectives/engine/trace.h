// Flight recorder: the last operations of this process in all groups, to diagnose hangs.
#pragma once

#include <string>

#include "segment.h"

namespace nlc {

// Records one call from construction on; "running" until done() or failed().
class Trace {
 public:
  Trace(const std::string &group, const CallSignature &call);
  void done(const char *path);
  void failed(const std::string &why);

 private:
  uint64_t index_;
};

std::string trace_json();

// Properties of an nlc_kind.
const char *kind_name(int kind);
bool reduces(int kind);
bool has_root(int kind);
bool is_message(int kind);
bool exchanges(int kind);  // takes parts for every rank

}  // namespace nlc
