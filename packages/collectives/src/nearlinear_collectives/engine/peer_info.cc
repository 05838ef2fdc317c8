#include "peer_info.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>

#include "sync.h"

namespace nlc {
namespace {

uint64_t hash_of(const std::string &text, uint64_t seed) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325ULL ^ seed;
  for (const unsigned char letter : text) hash = (hash ^ letter) * 0x100000001b3ULL;
  return hash;
}

std::string first_line(const char *path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

uint64_t namespace_of(const char *kind) {
  struct stat info{};
  return stat(format("/proc/self/ns/%s", kind).c_str(), &info) == 0 ? info.st_ino : 0;
}

struct ProcessState {
  char state;        // R, S, Z ...; 0 if there is no such process
  uint64_t started;  // clock ticks after boot
  uint64_t memory;   // bytes mapped; 0 once the process is exiting, before its files are closed
};

ProcessState state_of(int pid) {
  const std::string line = first_line(format("/proc/%d/stat", pid).c_str());
  const size_t name_end = line.rfind(')');  // the name may contain spaces and parentheses
  if (name_end == std::string::npos) return {0, 0, 0};
  char state = 0;
  unsigned long long started = 0, memory = 0;
  std::sscanf(
      line.c_str() + name_end + 1,
      " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu %llu",
      &state, &started, &memory);
  return {state, started, memory};
}

uint64_t random_number() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace

void describe_this_process(PeerInfo *peer) {
  peer->magic = kPeerInfoMagic;
  peer->abi = NLC_ABI_VERSION;
  peer->pid = getpid();
  peer->started = state_of(peer->pid).started;
  peer->nonce = random_number();
  peer->cores = cores_of_this_process();
  const std::string node = format(
      "%s/%llu/%llu/%u/%s", first_line("/proc/sys/kernel/random/boot_id").c_str(),
      static_cast<unsigned long long>(namespace_of("pid")),
      static_cast<unsigned long long>(namespace_of("net")), getuid(), setting("NODE").c_str());
  peer->node[0] = hash_of(node, 0);
  peer->node[1] = hash_of(node, 0x9e3779b97f4a7c15ULL);
  gethostname(peer->host, sizeof peer->host - 1);
}

const PeerInfo &read_peer_info(const unsigned char *bytes) {
  const PeerInfo &peer = *reinterpret_cast<const PeerInfo *>(bytes);
  if (peer.magic != kPeerInfoMagic || peer.abi != NLC_ABI_VERSION)
    throw Failure(
        NLC_BAD_ARGUMENT,
        "a rank runs another version of nearlinear_collectives: install one version on all nodes");
  return peer;
}

bool is_dead(const PeerInfo &peer) {
  PeerInfo mine{};
  describe_this_process(&mine);
  if (peer.node[0] != mine.node[0] || peer.node[1] != mine.node[1]) return false;
  const ProcessState now = state_of(peer.pid);
  return now.state == 0 || now.state == 'Z' || now.state == 'X' || now.memory == 0 ||
         now.started != peer.started;
}

}  // namespace nlc
