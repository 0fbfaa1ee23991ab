#include "errors.h"

#include <cerrno>
#include <system_error>

namespace syncline {

std::string with_errno(const std::string& text) { return text + ": " + std::generic_category().message(errno); }

}  // namespace syncline
