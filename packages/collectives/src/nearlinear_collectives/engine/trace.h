// Flight recorder: the last operations of this process in all groups, to diagnose hangs.
#pragma once

#include <string>
#include <vector>

#include "segment.h"

namespace nlc {

// Records one call from construction on; "running" until done() or failed().
class Trace {
 public:
  Trace(const std::string &group, const CallSignature &call);
  void done(const char *path);
  // The first failure of a process also writes the recorder to a file, if
  // NEARLINEAR_COLLECTIVES_TRACE is set: its value is the start of the path, the rank its end.
  void failed(const std::string &why);

 private:
  uint64_t index_;
};

std::string trace_json();
// Note the members of a group, of which this process is `rank`, for that file.
void remember_members(const std::string &group, const std::vector<int64_t> &global_ranks, int rank);

std::string count_text(uint64_t count, int dtype);  // "1000 x float32"

// Properties of an nlc_kind.
const char *kind_name(int kind);
bool reduces(int kind);
bool has_root(int kind);
bool is_message(int kind);
bool exchanges(int kind);  // takes parts for every rank

}  // namespace nlc
