#include "liveness.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace nlc {

Liveness::Liveness(const std::vector<PeerInfo> &peer_infos, const std::vector<int> &ranks) {
  for (const int rank : ranks) {
    const PeerInfo &peer = peer_infos[static_cast<size_t>(rank)];
    if (peer.pid == getpid()) continue;  // ranks that are threads live and die with this process
    Fd pidfd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
    if (is_dead(peer)) pidfd = Fd();  // ended earlier; another process may have its pid by now
    watched_.push_back({rank, std::move(pidfd), peer});
  }
}

std::vector<int> Liveness::dead() const {
  std::vector<pollfd> asked;
  asked.reserve(watched_.size());
  for (const Watched &one : watched_) asked.push_back({one.pidfd.get(), POLLIN, 0});
  ::poll(asked.data(), asked.size(), 0);
  std::vector<int> found;
  for (size_t i = 0; i < watched_.size(); ++i) {
    const bool dead = asked[i].fd >= 0 ? asked[i].revents != 0 : is_dead(watched_[i].peer);
    if (dead) found.push_back(watched_[i].rank);
  }
  return found;
}

}  // namespace nlc
