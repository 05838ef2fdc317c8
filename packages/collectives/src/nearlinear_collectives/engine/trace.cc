#include "trace.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>

#include "base.h"
#include "reduce.h"

namespace nlc {
namespace {

constexpr uint64_t kEntries = 256;

struct Entry {
  std::string group;
  CallSignature call{};
  Clock::time_point begun, ended;
  const char *state = "running";
  std::string detail;  // data path, or the error
};

struct Recorder {
  std::mutex mutex;
  Entry entries[kEntries];
  uint64_t next = 0;
  std::map<std::string, std::vector<int64_t>> members;  // of groups, as global ranks
  int64_t global_rank = 0;
  bool written = false;
};

Recorder &recorder() {
  static auto *the_one = new Recorder();
  return *the_one;
}

void finish(uint64_t index, const char *state, const std::string &detail) {
  Recorder &log = recorder();
  const std::lock_guard<std::mutex> lock(log.mutex);
  if (index + kEntries < log.next) return;  // overwritten in the meantime
  Entry &entry = log.entries[index % kEntries];
  entry.ended = Clock::now();
  entry.state = state;
  entry.detail = detail;
}

std::string members_json(const Recorder &log) {
  std::string text;
  for (const auto &[group, ranks] : log.members) {
    text += (text.empty() ? "" : ", ") + json_text(group) + ": [";
    for (size_t i = 0; i < ranks.size(); ++i)
      text += format(i ? ", %lld" : "%lld", static_cast<long long>(ranks[i]));
    text += "]";
  }
  return "{" + text + "}";
}

// Best effort: it must not hide the failure that it explains.
void write_once() {
  const std::string start = setting("TRACE");
  if (start.empty()) return;
  std::string path, head;
  {
    Recorder &log = recorder();
    const std::lock_guard<std::mutex> lock(log.mutex);
    if (std::exchange(log.written, true)) return;
    const auto rank = static_cast<long long>(log.global_rank);
    path = format("%s%lld", start.c_str(), rank);
    head = format("{\"rank\": %lld, \"groups\": ", rank) + members_json(log);
  }
  std::ofstream(path) << head << ", \"operations\": " << trace_json() << "}\n";
}

double us(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::micro>(to - from).count();
}

}  // namespace

std::string count_text(uint64_t count, int dtype) {
  return format("%llu x %s", static_cast<unsigned long long>(count), dtype_name(dtype));
}

const char *kind_name(int kind) {
  static const char *names[] = {"?",
                                "all_gather",
                                "reduce_scatter",
                                "all_reduce",
                                "broadcast",
                                "barrier",
                                "all_to_all",
                                "gather",
                                "scatter",
                                "reduce",
                                "uneven all_gather",
                                "uneven reduce_scatter",
                                "send",
                                "receive"};
  return names[kind >= NLC_ALL_GATHER && kind <= NLC_RECEIVE ? kind : 0];
}

bool reduces(int kind) {
  return kind == NLC_REDUCE_SCATTER || kind == NLC_ALL_REDUCE || kind == NLC_REDUCE ||
         kind == NLC_REDUCE_SCATTER_UNEVEN;
}

bool exchanges(int kind) {
  return kind == NLC_ALL_TO_ALL || kind == NLC_GATHER || kind == NLC_SCATTER ||
         kind == NLC_ALL_GATHER_UNEVEN || kind == NLC_REDUCE_SCATTER_UNEVEN;
}

bool has_root(int kind) {
  return kind == NLC_BROADCAST || kind == NLC_GATHER || kind == NLC_SCATTER || kind == NLC_REDUCE;
}

bool is_message(int kind) { return kind == NLC_SEND || kind == NLC_RECEIVE; }

Trace::Trace(const std::string &group, const CallSignature &call) {
  Recorder &log = recorder();
  const std::lock_guard<std::mutex> lock(log.mutex);
  index_ = log.next++;
  Entry &entry = log.entries[index_ % kEntries];
  entry.group = group;
  entry.call = call;
  entry.begun = entry.ended = Clock::now();
  entry.state = "running";
  entry.detail.clear();
}

void Trace::done(const char *path) { finish(index_, "done", path); }
void Trace::failed(const std::string &why) {
  finish(index_, "failed", why);
  write_once();
}

void remember_members(const std::string &group, const std::vector<int64_t> &global_ranks,
                      int rank) {
  Recorder &log = recorder();
  const std::lock_guard<std::mutex> lock(log.mutex);
  log.members[group] = global_ranks;
  log.global_rank = global_ranks[static_cast<size_t>(rank)];
}

std::string trace_json() {
  Recorder &log = recorder();
  const std::lock_guard<std::mutex> lock(log.mutex);
  const Clock::time_point now = Clock::now();
  std::string text = "[";
  for (uint64_t i = log.next > kEntries ? log.next - kEntries : 0; i < log.next; ++i) {
    const Entry &entry = log.entries[i % kEntries];
    const bool running = entry.state[0] == 'r';
    text += format(
        "%s{\"group\": %s, \"sequence\": %llu, \"operation\": \"%s\", \"count\": %llu, "
        "\"bytes\": %llu, \"dtype\": \"%s\", \"reduce\": \"%s\", \"root\": %d, "
        "\"state\": \"%s\", \"detail\": %s, \"microseconds\": %.1f, \"microseconds_ago\": %.1f}",
        text.size() > 1 ? ", " : "", json_text(entry.group).c_str(),
        static_cast<unsigned long long>(entry.call.sequence), kind_name(entry.call.kind),
        static_cast<unsigned long long>(entry.call.count),
        static_cast<unsigned long long>(entry.call.count * element_bytes(entry.call.dtype)),
        dtype_name(entry.call.dtype),
        reduces(entry.call.kind) ? reduce_name(entry.call.reduce) : "",
        has_root(entry.call.kind) || is_message(entry.call.kind) ? entry.call.root : -1,
        entry.state,
        json_text(entry.detail).c_str(), us(entry.begun, running ? now : entry.ended),
        us(entry.begun, now));
  }
  return text + "]";
}

}  // namespace nlc
