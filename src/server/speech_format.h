// Transcripts in OpenAI's formats: JSON, verbose JSON, text, subtitles, and the events of a stream.
#pragma once

#include <string>

#include "server/http_server.h"
#include "server/speech_service.h"

namespace freshet::server {

HttpResponse speech_response(const SpeechRequest& request, const speech::Transcription& done);
std::string speech_stream_delta(const std::string& text);
std::string speech_stream_end(const speech::Transcription& done);

}  // namespace freshet::server
