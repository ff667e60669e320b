// Segments as subtitles: SubRip (.srt) and WebVTT (.vtt). Pure.
#pragma once

#include <span>
#include <string>

#include "speech/transcription.h"

namespace freshet::speech {

std::string to_srt(std::span<const Segment> segments);
std::string to_vtt(std::span<const Segment> segments);

}  // namespace freshet::speech
