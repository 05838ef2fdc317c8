// Messages over TCP sockets: bytes go from the sender's memory to the receiver's, without framing.
//
// A node serves its destinations in the order of its sends. While the window of the first is full
// it serves the next, so that a receiver's full queue does not idle the sender's link. The kernel's
// send buffer bounds the bytes in flight: it starts small and follows the measured bandwidth-delay
// product, because a network drops the excess and TCP takes 200 ms to notice. It never holds less
// than two segments, because a receiver may delay the acknowledgement of a single one by 40 ms.
#include <sys/uio.h>

#include <deque>

#include "tcp_control.h"
#include "transport.h"

#ifndef SO_BUF_LOCK  // since Linux 5.14
#define SO_BUF_LOCK 72
#endif

namespace nlc {
namespace {

constexpr int kFirstWindow = 12 << 10;
constexpr int kLastWindow = 4 << 20;
constexpr int kDestinations = 8;           // served at once; as many windows may meet in one queue
constexpr int kPieces = 16;                // messages per system call
constexpr size_t kTurn = size_t{1} << 20;  // bytes per system call, so that all links get a turn

struct Message {
  char *data;
  size_t bytes;  // remaining
  Request *request;
  uint64_t order;  // of this node's sends
};

// Remove moved bytes from the front of a queue, and finished messages with them.
void advance(std::deque<Message> &queue, size_t moved) {
  while (!queue.empty() && queue.front().bytes <= moved) {
    moved -= queue.front().bytes;
    queue.front().request->done = true;
    queue.pop_front();
  }
  if (moved == 0) return;
  queue.front().data += moved;
  queue.front().bytes -= moved;
}

struct Pieces {
  iovec parts[kPieces];
  int count = 0;
  size_t bytes = 0;

  explicit Pieces(const std::deque<Message> &queue) {
    for (const Message &message : queue) {
      if (count == kPieces || bytes >= kTurn) break;
      parts[count] = {message.data, std::min(message.bytes, kTurn - bytes)};
      bytes += parts[count++].iov_len;
    }
  }
};

struct Link {
  tcp::Socket socket{};
  std::deque<Message> sends{}, receives{};
  Clock::time_point active{};  // last arrival, or the first receive posted on an empty queue
  bool readable = false, writable = false;
  bool hung_up = false;  // the other side sends no more
  bool ended = false;
  int smallest_window = kFirstWindow;
  int window = 0;
  Clock::time_point busy_since{};  // since the window was examined, or the link was idle
  int64_t sent_since = 0;          // excluding the bytes in flight by then

  bool idle() const { return sends.empty() && receives.empty(); }
};

class TcpTransport : public Transport {
 public:
  TcpTransport() : fixed_window_(static_cast<int>(setting_number("WINDOW", 0))) {
    if (fixed_window_ != 0 && (fixed_window_ < 4096 || fixed_window_ > 1 << 30))
      throw Failure(NLC_BAD_ARGUMENT,
                    "NEARLINEAR_COLLECTIVES_WINDOW must be 4096 to 1073741824 bytes");
  }

  ~TcpTransport() override {
    bool idle = control_.connected() && !failure_;
    std::vector<int> open;
    for (const Link &link : links_) {
      idle &= link.idle();
      if (link.socket && !link.ended) open.push_back(link.socket.get());
    }
    try {
      control_.leave(idle, open);
    } catch (const std::exception &) {
      // The other nodes see the connections close without a message.
    }
  }

  std::string address() const override { return control_.address(); }

  void connect(const std::vector<std::string> &addresses, int my_node, const Key &key,
               int64_t timeout_ms) override {
    std::vector<tcp::Socket> sockets = control_.connect(addresses, my_node, key, timeout_ms);
    links_.resize(sockets.size());
    for (size_t node = 0; node < links_.size(); ++node) {
      if (!sockets[node]) continue;
      Link &link = links_[node];
      link.socket = std::move(sockets[node]);
      link.smallest_window = std::max(kFirstWindow, 2 * tcp::segment_bytes(link.socket.get()));
      set_window(link, fixed_window_ ? fixed_window_ : link.smallest_window);
      control_.watch_data(static_cast<int>(node), link.socket.get());
    }
  }

  void post_send(int node, const void *data, size_t bytes, Request *request) override {
    Link &link = link_to(node);
    *request = Request{bytes == 0};
    if (bytes == 0) return;
    if (link.sends.empty()) {
      link.busy_since = Clock::now();
      link.sent_since = -link.window;
    }
    link.sends.push_back(
        {const_cast<char *>(static_cast<const char *>(data)), bytes, request, ++posted_});
  }

  void post_receive(int node, void *data, size_t bytes, Request *request) override {
    Link &link = link_to(node);
    *request = Request{bytes == 0};
    if (bytes == 0) return;
    if (link.receives.empty()) link.active = Clock::now();
    link.receives.push_back({static_cast<char *>(data), bytes, request, 0});
    link.readable |= link.hung_up;
  }

  bool poll(int timeout_us) override {
    if (failure_) throw LinkFailure(*failure_);
    bool moved = step(0);
    if (moved || timeout_us <= 0) return moved;
    const Clock::time_point until = Clock::now() + std::chrono::microseconds(timeout_us);
    for (int64_t left = timeout_us; !moved && !woken_ && left > 0;) {
      moved = step(control_.poll_timeout_us(left));
      left = std::chrono::ceil<std::chrono::microseconds>(until - Clock::now()).count();
    }
    return moved;
  }

  void wake_on(int eventfd) override { control_.wake_on(eventfd); }

  void give_up(const std::string &reason) noexcept override {
    try {
      control_.give_up(reason);
    } catch (const std::exception &) {
      // Best effort: the other nodes notice the closed connections.
    }
    if (!failure_) failure_.emplace(control_.my_node(), reason);
  }

  int awaited() const override { return tcp::quietest(links_); }
  void tell_awaited(int node) override { control_.tell_awaited(node); }
  int stuck_behind(int node) const override { return control_.stuck_behind(node); }

  std::string describe() const override {
    int window = fixed_window_ ? fixed_window_ : kFirstWindow;
    for (const Link &link : links_) window = std::max(window, link.window);
    return format("tcp, window %s, %s (%s)", bytes_text(static_cast<uint64_t>(window)).c_str(),
                  control_.interface().name.c_str(),
                  tcp::host_text(control_.interface().address).c_str());
  }

  uint64_t bytes_sent() const override { return bytes_sent_; }

 private:
  Link &link_to(int node) {
    if (node < 0 || static_cast<size_t>(node) >= links_.size() ||
        !links_[static_cast<size_t>(node)].socket)
      throw Failure(NLC_BAD_ARGUMENT, format("no link with node %d", node));
    return links_[static_cast<size_t>(node)];
  }

  // Wait for events if requested, and move as many bytes as possible. Rethrows link failures.
  bool step(int64_t timeout_us) {
    woken_ = control_.wait(timeout_us, [this](int node, uint32_t events) {
      Link &link = links_[static_cast<size_t>(node)];
      link.hung_up |= (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
      link.readable |= link.hung_up || (events & EPOLLIN);
      link.writable |= (events & (EPOLLOUT | EPOLLERR)) != 0;
    });
    bool moved = send_some();
    for (size_t node = 0; node < links_.size(); ++node) {
      Link &link = links_[node];
      if (link.readable && (link.hung_up || !link.receives.empty()))
        moved |= receive_some(static_cast<int>(node), link);
    }
    try {
      control_.check([this](int node) { return !links_[static_cast<size_t>(node)].idle(); });
    } catch (const LinkFailure &failure) {
      failure_ = failure;
      throw;
    }
    return moved;
  }

  // Link to send on now: the first in the order of sends, or the next one while that is full.
  int next_to_send() const {
    uint64_t after = 0;
    for (int tried = 0; tried < kDestinations; ++tried) {
      int first = -1;
      for (size_t node = 0; node < links_.size(); ++node) {
        const Link &link = links_[node];
        if (link.sends.empty() || link.sends.front().order <= after) continue;
        if (first < 0 || link.sends.front().order < order_of(first)) first = static_cast<int>(node);
      }
      if (first < 0 || links_[static_cast<size_t>(first)].writable) return first;
      after = order_of(first);
    }
    return -1;
  }

  uint64_t order_of(int node) const {
    return links_[static_cast<size_t>(node)].sends.front().order;
  }

  bool send_some() {
    bool moved = false;
    for (size_t turn = 0; turn < kTurn;) {
      const int node = next_to_send();
      if (node < 0) break;
      Link &link = links_[static_cast<size_t>(node)];
      Pieces pieces(link.sends);
      msghdr message{};
      message.msg_iov = pieces.parts;
      message.msg_iovlen = static_cast<size_t>(pieces.count);
      const ssize_t n = ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        link.writable = false;
        if (errno != EAGAIN) {
          end(node, link, errno);
          break;
        }
        continue;
      }
      const size_t bytes = static_cast<size_t>(n);
      advance(link.sends, bytes);
      bytes_sent_ += bytes;
      turn += bytes;
      moved = true;
      // A short write means a full buffer; epoll reports when there is room again.
      if (bytes < pieces.bytes) link.writable = false;
      link.sent_since += n;
      if (!fixed_window_ && link.sent_since >= 4 * link.window) follow_the_path(link);
    }
    return moved;
  }

  bool receive_some(int node, Link &link) {
    bool moved = false;
    for (size_t turn = 0; turn < kTurn && link.readable;) {
      char peeked;
      const bool wanted = !link.receives.empty();
      Pieces pieces(link.receives);
      const ssize_t n = wanted ? ::readv(link.socket.get(), pieces.parts, pieces.count)
                               : ::recv(link.socket.get(), &peeked, 1, MSG_PEEK);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) {
        link.readable = false;
      } else if (n <= 0) {
        end(node, link, n < 0 ? errno : 0);
      } else if (!wanted) {
        link.readable = false;  // until a receive is posted
      } else {
        advance(link.receives, static_cast<size_t>(n));
        link.active = Clock::now();
        control_.heard_from(node);
        turn += static_cast<size_t>(n);
        moved = true;
        // A short read has emptied the socket, unless its end is near and must be detected.
        if (static_cast<size_t>(n) < pieces.bytes) link.readable = link.hung_up;
        if (link.receives.empty() && !link.hung_up) break;
      }
    }
    return moved;
  }

  void end(int node, Link &link, int error) {
    link.readable = link.writable = false;
    link.ended = true;
    control_.data_ended(node, tcp::Control::error_text(error));
  }

  // Window of twice the capacity of the path with empty queues, enough to keep it full while
  // acknowledgements travel. The capacity is the arrival rate times the shortest round trip. A
  // window that fills queues raises neither, so it stops growing.
  void follow_the_path(Link &link) {
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - link.busy_since).count();
    const double rate = static_cast<double>(link.sent_since) / std::max(seconds, 1e-6);
    link.busy_since = now;
    link.sent_since = 0;
    tcp_info info{};
    socklen_t bytes = sizeof info;
    if (::getsockopt(link.socket.get(), IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0 ||
        bytes < offsetof(tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt)
      return;
    const double held = rate * info.tcpi_min_rtt * 1e-6;
    // In steps, because a single sample is noisy.
    const int wanted = static_cast<int>(std::clamp(2 * held, 0.5 * link.window, 2.0 * link.window));
    const int window = std::clamp(wanted, link.smallest_window, kLastWindow);
    if (window > link.window * 5 / 4 || window < link.window * 3 / 4) set_window(link, window);
  }

  void set_window(Link &link, int window) {
    const int fd = link.socket.get();
    link.window = window;
    if (::setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &window, sizeof window) != 0) {
      tcp::set_option(fd, SOL_SOCKET, SO_SNDBUF, window);
      int granted = 0;  // twice the requested size: includes the kernel's bookkeeping
      socklen_t bytes = sizeof granted;
      ::getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &granted, &bytes);
      // Only the kernel's automatic sizing can exceed net.core.wmem_max.
      if (granted / 2 < window) tcp::set_option(fd, SOL_SOCKET, SO_BUF_LOCK, 0);
    }
    tcp::set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, std::max(window / 2, kFirstWindow));
  }

  const int fixed_window_;
  std::vector<Link> links_;
  uint64_t posted_ = 0;  // number of sends
  std::optional<LinkFailure> failure_;
  uint64_t bytes_sent_ = 0;
  bool woken_ = false;
  tcp::Control control_;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport() { return std::make_unique<TcpTransport>(); }

}  // namespace nlc
