#include "base/thread_priority.h"

#ifdef __linux__
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace freshet {

void give_way() {
#ifdef __linux__
  constexpr int kLast = 19;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kLast);  // of this thread alone
#endif
}

}  // namespace freshet
