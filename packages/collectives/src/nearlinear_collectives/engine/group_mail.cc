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
                          std::move(mail_listener_),
                          mail_interface_,
                          liveness_,
                          key(),
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

void Group::close_mail(const std::string &reason, bool in_order) {
  std::shared_ptr<Mailbox> mailbox;
  {
    const std::lock_guard<std::mutex> lock(mailbox_mutex_);
    mailbox = mailbox_;
    mail_listener_ = {};
  }
  if (mailbox) mailbox->close(reason, in_order);
  if (in_order) forget_mail(own_info_);
}

}  // namespace nlc
