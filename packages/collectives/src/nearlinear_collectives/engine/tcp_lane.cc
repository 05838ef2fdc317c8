// Messages with a rank of another node, over two connections.
//
// Each rank connects one of the two, sends its messages on it, and receives their answers there.
// Both ranks connect, even if only one sends: a port that refuses tells that the process is gone,
// and a connection without data notices a lost network within seconds. One with data that is not
// acknowledged would try for minutes.
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "mailbox.h"

namespace nlc {
namespace {

constexpr size_t kWithEnvelope = size_t{8} << 10;  // bytes of a message that follow it
constexpr size_t kLargestChunk = size_t{1} << 20;  // so that envelopes are not delayed for long
constexpr size_t kTurn = size_t{4} << 20;          // bytes before other lanes get a turn
constexpr size_t kText = 768;
// Time for the last messages of one connection to arrive after the other has ended.
constexpr std::chrono::milliseconds kGrace{200};
constexpr std::chrono::seconds kUnreachable{6};

enum FrameKind : int32_t { kEnvelope = 1, kChunk, kGranted, kReceived, kFailed, kLeft };

// Followed by the data of a short message or a chunk, or by the text of a failure.
struct Frame {
  int32_t kind;
  int32_t detail;   // dtype of a message, nlc_status of a failure
  int64_t tag;      // of a message
  uint64_t number;  // of the message
  uint64_t bytes;   // of the message, the chunk or the text
};
static_assert(sizeof(Frame) == 32);

// One connection: frames out of and into this process.
class Channel {
 public:
  tcp::Socket fd;
  bool over = false;  // nothing more arrives
  std::string why{};  // error of a broken connection

  bool sending() const { return head_sent_ < head_.size() || body_bytes_ > 0; }

  // Begin to send a frame with a copied and a referenced part.
  void put(const Frame &frame, const void *copied, size_t copied_bytes, const char *body = nullptr,
           size_t body_bytes = 0) {
    head_.assign(reinterpret_cast<const char *>(&frame), sizeof frame);
    if (copied_bytes) head_.append(static_cast<const char *>(copied), copied_bytes);
    head_sent_ = 0;
    body_ = body;
    body_bytes_ = body_bytes;
  }

  bool flush() {
    bool moved = false;
    while (sending()) {
      iovec parts[] = {{head_.data() + head_sent_, head_.size() - head_sent_},
                       {const_cast<char *>(body_), body_bytes_}};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = 2;
      const ssize_t n = ::sendmsg(fd.get(), &message, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) break;
      if (n < 0) {  // what the other side sent before its end can still be read
        drop_output();
        break;
      }
      moved = true;
      const size_t bytes = static_cast<size_t>(n), of_head = std::min(bytes, parts[0].iov_len);
      head_sent_ += of_head;
      body_ += bytes - of_head;
      body_bytes_ -= bytes - of_head;
    }
    return moved;
  }

  // Received bytes that no frame has taken yet.
  const char *data() const { return buffer_ + taken_; }
  size_t available() const { return filled_ - taken_; }
  void take(size_t bytes) { taken_ += bytes; }

  bool fill() {
    std::memmove(buffer_, data(), available());
    filled_ -= taken_;
    taken_ = 0;
    const size_t n = receive(buffer_ + filled_, sizeof buffer_ - filled_);
    filled_ += n;
    return n > 0;
  }
  // Take up to `bytes` to memory of the caller; return their number.
  size_t take_to(char *to, size_t bytes) {
    if (available() == 0) return receive(to, bytes);
    const size_t n = std::min(bytes, available());
    std::memcpy(to, data(), n);
    take(n);
    return n;
  }

  // Close without losing what was sent: unread bytes would reset the connection.
  void close() {
    char unread[8192];
    size_t limit = kTurn;
    while (fd && !over && limit > 0) {
      const size_t n = receive(unread, sizeof unread);
      if (n == 0) break;
      limit -= std::min(limit, n);
    }
    if (fd) ::shutdown(fd.get(), SHUT_WR);
    fd = tcp::Socket();
    drop_output();
  }

 private:
  void drop_output() {
    head_.clear();
    head_sent_ = body_bytes_ = 0;
  }

  size_t receive(char *to, size_t bytes) {
    while (!over) {
      const ssize_t n = ::recv(fd.get(), to, bytes, 0);
      if (n > 0) return static_cast<size_t>(n);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return 0;
      over = true;
      if (n < 0 && errno != ECONNRESET && errno != EPIPE) why = std::strerror(errno);
    }
    return 0;
  }

  std::string head_{};
  size_t head_sent_ = 0;
  const char *body_ = nullptr;
  size_t body_bytes_ = 0;
  char buffer_[2 * kWithEnvelope];
  size_t filled_ = 0, taken_ = 0;
};

class TcpLane : public Lane {
 public:
  TcpLane(Mailbox &box, int rank)
      : Lane(box, rank),
        address_(box.roster().peer(rank).mail_address),
        call_(std::in_place, rank, tcp::kMail, address_) {}

  bool is_local() const override { return false; }

  bool move() override {
    bool moved = dial();
    moved |= send_messages();
    moved |= read(out_);
    moved |= read(in_);
    moved |= send_answers();
    judge();
    return moved;
  }

  void watch(std::vector<pollfd> &waits) const override {
    if (call_ && call_->fd) waits.push_back({call_->fd.get(), call_->events(), 0});
    for (const Channel *one : {&out_, &in_}) {
      const short wanted = one->sending() ? POLLIN | POLLOUT : POLLIN;
      if (one->fd && !one->over) waits.push_back({one->fd.get(), wanted, 0});
    }
  }

  void leave(nlc_status status, const std::string &text) override {
    for (Channel *one : {&out_, &in_})
      if (one->fd && !one->sending()) part(*one, status, text);
    out_.close();
    in_.close();
    call_.reset();
  }

  void adopt(tcp::Socket fd) override {
    if (!closed) {
      if (!in_.fd) in_.fd = std::move(fd);
      return;
    }
    if (!end) return;
    Channel late;
    late.fd = std::move(fd);
    part(late, end->status, box_.told(*end));
    late.close();
  }

 private:
  static void part(Channel &from, nlc_status status, const std::string &text) {
    const std::string reason = text.substr(0, status == NLC_OK ? 0 : kText);
    from.put({status == NLC_OK ? kLeft : kFailed, status, 0, 0, reason.size()}, reason.data(),
             reason.size());
    from.flush();
  }

  bool dial() {
    if (!call_ || end) return false;
    const Clock::time_point now = Clock::now();
    if (dialed_ == Clock::time_point{}) dialed_ = now;
    try {
      if (!call_->fd) {
        if (now < call_->next()) return false;
        call_->dial(box_.party());
        if (!call_->fd) return true;
        tcp::set_liveness(call_->fd.get());
      }
      pollfd one{call_->fd.get(), call_->events(), 0};
      if (::poll(&one, 1, 0) == 1 && call_->advance(box_.party())) {
        out_.fd = std::move(call_->fd);
        call_.reset();
        return true;
      }
    } catch (const LinkFailure &failure) {
      end_with(failure.what());
      return true;
    }
    // The kernel of the other host answers even if its process is stopped.
    if (!call_->greeted() && now - dialed_ > kUnreachable)
      end_with(format("no connection to %s in %d s: %s", address_.c_str(),
                      static_cast<int>(kUnreachable.count()), call_->trouble().c_str()));
    return false;
  }

  bool send_messages() {
    bool moved = false;
    for (size_t turn = 0; out_.fd && turn < kTurn;) {
      if (!out_.sending() && !unannounced_.empty()) {
        Transfer &send = *unannounced_.front();
        const size_t inside = send.bytes <= kWithEnvelope ? send.bytes : 0;
        send.path = send.bytes <= kWithEnvelope ? "with the envelope" : "network";
        out_.put({kEnvelope, send.dtype, send.tag, send.number, send.bytes}, send.data, inside);
        unannounced_.pop_front();
      } else if (!out_.sending() && !outgoing_.empty()) {
        Transfer &send = *outgoing_.front();
        const size_t bytes = std::min<size_t>(kLargestChunk, send.bytes - send.moved);
        out_.put({kChunk, 0, 0, send.number, bytes}, nullptr, 0, send.data + send.moved, bytes);
        send.moved += bytes;
        turn += bytes;
        if (send.moved == send.bytes) outgoing_.pop_front();
      } else if (!out_.sending()) {
        break;
      }
      moved |= out_.flush();
      if (out_.sending()) break;
    }
    return moved;
  }

  bool send_answers() {
    bool moved = false;
    while (in_.fd) {
      moved |= in_.flush();
      if (in_.sending()) break;
      if (completes_) box_.complete(std::exchange(completes_, nullptr));
      if (answers_.empty()) break;
      const Reply reply = std::move(answers_.front());
      answers_.pop_front();
      completes_ = reply.completes;
      in_.put({reply.answer.word == Word::kGrant ? kGranted : kReceived, 0, 0,
               reply.answer.number, 0},
              nullptr, 0);
      moved = true;
    }
    return moved;
  }

  bool read(Channel &from) {
    bool moved = false;
    for (size_t turn = 0; from.fd && !end && turn < kTurn;) {
      if (&from == &in_ && chunk_left_ > 0) {
        const size_t bytes = read_chunk();
        if (bytes == 0) break;
        turn += bytes;
        moved = true;
        continue;
      }
      Frame frame{};
      size_t needed = sizeof frame;
      if (from.available() >= needed) {
        std::memcpy(&frame, from.data(), sizeof frame);
        if (!is_valid(frame, &from == &in_)) {
          end = LaneEnd{NLC_SYSTEM,
                        box_.roster().rank_text(rank) + " sent bytes that are no message", false};
          return true;
        }
        if (frame.kind == kFailed || (frame.kind == kEnvelope && frame.bytes <= kWithEnvelope))
          needed += frame.bytes;
      }
      if (from.available() < needed) {
        if (!from.fill()) break;
        moved = true;
        continue;
      }
      handle(frame, from.data() + sizeof frame, from);
      from.take(needed);
      moved = true;
      if (from.over) break;
    }
    return moved;
  }

  bool is_valid(const Frame &frame, bool of_messages) const {
    switch (frame.kind) {
      case kEnvelope: return of_messages && frame.detail >= 0 && frame.detail < NLC_DTYPES;
      case kChunk: {
        if (!of_messages || incoming_.empty()) return false;
        const Transfer &receive = *incoming_.front();
        return receive.number == frame.number && frame.bytes > 0 &&
               frame.bytes <= receive.bytes - receive.moved;
      }
      case kGranted:
      case kReceived: return !of_messages;
      case kFailed: return frame.bytes <= kText && frame.detail > NLC_OK;
      default: return frame.kind == kLeft;
    }
  }

  void handle(const Frame &frame, const char *data, Channel &from) {
    switch (frame.kind) {
      case kEnvelope:
        box_.arrive(*this,
                    {frame.tag, frame.number, frame.bytes,
                     frame.bytes <= kWithEnvelope ? kWithIt : kLater, frame.detail, 0},
                    data);
        break;
      case kChunk: chunk_left_ = frame.bytes; break;
      case kGranted: take({frame.number, Word::kGrant, 0}); break;
      case kReceived: take({frame.number, Word::kDone, 0}); break;
      case kFailed:
        end = LaneEnd{static_cast<nlc_status>(frame.detail), std::string(data, frame.bytes), false};
        break;
      default: left_ = from.over = true;
    }
  }

  size_t read_chunk() {
    const TransferPtr receive = incoming_.front();
    const size_t bytes = in_.take_to(receive->data + receive->moved, chunk_left_);
    receive->moved += bytes;
    chunk_left_ -= bytes;
    if (receive->moved == receive->bytes) {
      incoming_.pop_front();
      acknowledge(receive);
    }
    return bytes;
  }

  // End the lane if the connections have ended.
  void judge() {
    if (end || (!in_.over && !out_.over)) return;
    const Clock::time_point now = Clock::now();
    if (over_since_ == Clock::time_point{}) over_since_ = now;
    const bool both = (in_.over || !in_.fd) && (out_.over || !out_.fd);
    if (!both && now - over_since_ < kGrace) return;
    const std::string who = box_.roster().rank_text(rank);
    const std::string &why = out_.why.empty() ? in_.why : out_.why;
    if (left_)
      end = LaneEnd{NLC_PEER_DIED, who + " has left the group", true};
    else
      end_with(why.empty() ? "it closed the connection" : "the connection is lost: " + why);
  }

  void end_with(const std::string &why) {
    end = LaneEnd{NLC_PEER_DIED, box_.roster().rank_text(rank) + ": " + why, false};
  }

  std::string address_;
  std::optional<tcp::Call> call_;  // until out_ is connected
  Clock::time_point dialed_{};
  Channel out_{}, in_{};
  TransferPtr completes_{};  // receive whose answer is being sent
  uint64_t chunk_left_ = 0;  // bytes of the chunk that is being received
  bool left_ = false;
  Clock::time_point over_since_{};
};

}  // namespace

std::unique_ptr<Lane> make_tcp_lane(Mailbox &box, int rank) {
  return std::make_unique<TcpLane>(box, rank);
}

}  // namespace nlc
