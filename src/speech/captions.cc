#include "speech/captions.h"

#include <cmath>

#include <fmt/format.h>

namespace freshet::speech {
namespace {

std::string time_text(double seconds, char point) {
  const auto ms = static_cast<int64_t>(std::llround(seconds * 1000));
  return fmt::format("{:02}:{:02}:{:02}{}{:03}", ms / 3600000, ms / 60000 % 60, ms / 1000 % 60,
                     point, ms % 1000);
}

// Without white space around it, and without what would end or begin a cue: empty lines and arrows.
std::string caption_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool blank = c == ' ' || c == '\n' || c == '\r' || c == '\t';
    if (blank && (out.empty() || out.back() == ' ')) continue;
    out += blank ? ' ' : c;
  }
  if (!out.empty() && out.back() == ' ') out.pop_back();
  for (size_t at = out.find("-->"); at != std::string::npos; at = out.find("-->", at))
    out.replace(at, 3, "->");
  return out;
}

}  // namespace

std::string to_srt(std::span<const Segment> segments) {
  std::string out;
  int number = 0;
  for (const Segment& s : segments) {
    const std::string text = caption_text(s.text);
    if (text.empty()) continue;
    out += fmt::format("{}\n{} --> {}\n{}\n\n", ++number, time_text(s.start, ','),
                       time_text(s.end, ','), text);
  }
  return out;
}

std::string to_vtt(std::span<const Segment> segments) {
  std::string out = "WEBVTT\n\n";
  for (const Segment& s : segments) {
    const std::string text = caption_text(s.text);
    if (text.empty()) continue;
    out += fmt::format("{} --> {}\n{}\n\n", time_text(s.start, '.'), time_text(s.end, '.'), text);
  }
  return out;
}

}  // namespace freshet::speech
