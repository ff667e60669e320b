// Errors as values.
//
// Status has a code and a one-line message for a person: it names the problem and, if there is one,
// the fix. Result<T> is a T or a Status that is not ok. Both are cheap to move; neither is
// synchronised. User and I/O errors are returned as Status up to the API. Programming errors are
// FRESHET_CHECKs, which stay on in release builds. Nothing here prints except a failed check.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include <fmt/format.h>

namespace freshet {

enum class StatusCode {
  kOk,
  kInvalidArgument,    // bad input or usage: a malformed file, request or flag
  kNotFound,           // a missing file, model or tensor
  kUnsupported,        // well-formed, but not supported
  kResourceExhausted,  // does not fit: memory, queue, limit
  kIo,                 // an error of the operating system
  kCancelled,          // cancelled by the caller (Ctrl-C, a disconnected client)
  kInternal,           // a bug of ours
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // Adds context to the same error: "<context>: <message>".
  Status with_context(std::string_view context) const {
    return ok() ? *this : Status(code_, fmt::format("{}: {}", context, message_));
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

template <class... Args>
Status invalid_argument(fmt::format_string<Args...> f, Args&&... args) {
  return {StatusCode::kInvalidArgument, fmt::format(f, std::forward<Args>(args)...)};
}
template <class... Args>
Status not_found(fmt::format_string<Args...> f, Args&&... args) {
  return {StatusCode::kNotFound, fmt::format(f, std::forward<Args>(args)...)};
}
template <class... Args>
Status unsupported(fmt::format_string<Args...> f, Args&&... args) {
  return {StatusCode::kUnsupported, fmt::format(f, std::forward<Args>(args)...)};
}
template <class... Args>
Status resource_exhausted(fmt::format_string<Args...> f, Args&&... args) {
  return {StatusCode::kResourceExhausted, fmt::format(f, std::forward<Args>(args)...)};
}
template <class... Args>
Status io_error(fmt::format_string<Args...> f, Args&&... args) {
  return {StatusCode::kIo, fmt::format(f, std::forward<Args>(args)...)};
}
template <class... Args>
Status cancelled(fmt::format_string<Args...> f, Args&&... args) {
  return {StatusCode::kCancelled, fmt::format(f, std::forward<Args>(args)...)};
}
template <class... Args>
Status internal_error(fmt::format_string<Args...> f, Args&&... args) {
  return {StatusCode::kInternal, fmt::format(f, std::forward<Args>(args)...)};
}

// Prints "CHECK failed: ..." to stderr and aborts.
[[noreturn]] void check_failed(const char* expression, const char* file, int line,
                               const std::string& detail);

#define FRESHET_CHECK(condition, ...)                                \
  do {                                                               \
    if (!(condition)) [[unlikely]]                                   \
      ::freshet::check_failed(#condition, __FILE__, __LINE__,        \
                              ::freshet::detail::text(__VA_ARGS__)); \
  } while (0)

namespace detail {
inline std::string text() {
  return {};
}
template <class... Args>
std::string text(fmt::format_string<Args...> f, Args&&... args) {
  return fmt::format(f, std::forward<Args>(args)...);
}
}  // namespace detail

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::in_place_index<1>, std::move(value)) {}
  Result(Status status) : v_(std::in_place_index<0>, std::move(status)) {
    FRESHET_CHECK(!std::get<0>(v_).ok(), "a Result made from an ok Status holds no value");
  }

  bool ok() const { return v_.index() == 1; }
  Status status() const { return ok() ? Status() : std::get<0>(v_); }

  // REQUIRES: ok().
  T& value() & { return get(); }
  const T& value() const& { return const_cast<Result*>(this)->get(); }
  T&& value() && { return std::move(get()); }
  T& operator*() & { return get(); }
  const T& operator*() const& { return const_cast<Result*>(this)->get(); }
  T&& operator*() && { return std::move(get()); }
  T* operator->() { return &get(); }
  const T* operator->() const { return &const_cast<Result*>(this)->get(); }

 private:
  T& get() {
    FRESHET_CHECK(ok(), "{}", std::get<0>(v_).message());
    return std::get<1>(v_);
  }
  std::variant<Status, T> v_;
};

#define FRESHET_CONCAT_(a, b) a##b
#define FRESHET_CONCAT(a, b) FRESHET_CONCAT_(a, b)
#define FRESHET_RETURN_IF_ERROR(expression)                         \
  do {                                                              \
    if (auto status_ = (expression); !status_.ok()) return status_; \
  } while (0)
// FRESHET_ASSIGN_OR_RETURN(auto x, f());
#define FRESHET_ASSIGN_OR_RETURN(lhs, expression) \
  FRESHET_ASSIGN_OR_RETURN_(FRESHET_CONCAT(result_, __LINE__), lhs, expression)
// NOLINTBEGIN(bugprone-macro-parentheses): names and declarations
#define FRESHET_ASSIGN_OR_RETURN_(result, lhs, expression) \
  auto result = (expression);                              \
  if (!result.ok()) return result.status();                \
  lhs = std::move(result).value()
// NOLINTEND(bugprone-macro-parentheses)

}  // namespace freshet
