// Messages of a group: the mailbox is created on first use, its address with the group.
#include <cstring>

#include "group.h"
#include "mailbox.h"

namespace nlc {

void Group::open_mail() {
  mail_fd_ = make_memory("nearlinear-mail", 0);
  own_info_.mail_fd = mail_fd_.get();
  mail_interface_ = tcp::choose_interface();
  mail_listener_ = tcp::listen_on(mail_interface_);
  std::strncpy(own_info_.mail_address, mail_listener_.address.c_str(),
               sizeof own_info_.mail_address - 1);
}

std::shared_ptr<Mailbox> Group::mailbox() {
  check_usable();
  const std::lock_guard<std::mutex> lock(mailbox_mutex_);
  if (aborted_.load())
    throw Failure(NLC_ABORTED, roster_.failure_text(rank(), abort_reason_));
  if (!mailbox_) {
    MailSettings settings{roster_,
                          {},
                          {},
                          liveness_,
                          std::move(mail_listener_),
                          {mail_interface_, rank(), size(), key()},
                          spin_budget_,
                          ranks_here() <= own_info_.cores};
    for (const Neighbour &neighbour : neighbours_) {
      settings.segments.push_back(neighbour.mapping);
      settings.pools.push_back(neighbour.pool);
    }
    mailbox_ = std::make_shared<Mailbox>(std::move(settings));
  }
  return mailbox_;
}

// A death that was noticed in a message ends the collectives of the other ranks too, and the other
// way round: they may wait for this rank, which leaves because of it.
void Group::leave() {
  if (failure_status_ == NLC_OK)
    if (const auto death = death_in_messages()) publish_failure(death->status, death->text);
  own_->closed.store(1, std::memory_order_release);
  if (failure_status_ == NLC_PEER_DIED)
    close_mail(failure_status_, failure_text_, failure_text_);
  else
    close_mail(NLC_ABORTED, "the group is being closed", "");
  forget_mail(own_info_);
}

std::optional<LaneEnd> Group::death_in_messages() {
  std::shared_ptr<Mailbox> mailbox;
  {
    const std::lock_guard<std::mutex> lock(mailbox_mutex_);
    mailbox = mailbox_;
  }
  return mailbox ? mailbox->death() : std::nullopt;
}

void Group::close_mail(nlc_status status, const std::string &reason,
                       const std::string &to_others) {
  std::shared_ptr<Mailbox> mailbox;
  {
    const std::lock_guard<std::mutex> lock(mailbox_mutex_);
    mailbox = mailbox_;
    mail_listener_ = {};
  }
  if (mailbox) mailbox->close(status, reason, to_others);
}

}  // namespace nlc
