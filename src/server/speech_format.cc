#include "server/speech_format.h"

#include <cmath>
#include <utility>

#include "speech/captions.h"
#include "speech/languages.h"

namespace freshet::server {
namespace {

json::Value usage_of_sound(const speech::Transcription& done) {
  json::Object usage;
  usage["type"] = "duration";
  usage["seconds"] = static_cast<int64_t>(std::ceil(done.duration()));
  return json::Value(std::move(usage));
}

// To milliseconds: more digits are noise.
double rounded(double x) {
  return std::round(x * 1000) / 1000;
}

json::Value segments_json(const speech::Transcription& done) {
  json::Array segments;
  for (const speech::Segment& s : done.segments()) {
    json::Object o;
    o["id"] = segments.size();
    o["seek"] = s.seek;
    o["start"] = rounded(s.start);
    o["end"] = rounded(s.end);
    o["text"] = s.text;
    json::Array tokens;
    for (const int32_t id : s.tokens) tokens.emplace_back(int64_t{id});
    o["tokens"] = std::move(tokens);
    o["temperature"] = rounded(static_cast<double>(s.temperature));
    o["avg_logprob"] = s.avg_logprob;
    o["compression_ratio"] = s.compression_ratio;
    o["no_speech_prob"] = s.no_speech_prob;
    segments.emplace_back(std::move(o));
  }
  return json::Value(std::move(segments));
}

json::Value words_json(const speech::Transcription& done) {
  json::Array words;
  for (const speech::Segment& s : done.segments()) {
    for (const speech::Word& word : s.words) {
      json::Object o;
      o["word"] = word.text;
      o["start"] = rounded(word.start);
      o["end"] = rounded(word.end);
      words.emplace_back(std::move(o));
    }
  }
  return json::Value(std::move(words));
}

}  // namespace

HttpResponse speech_response(const SpeechRequest& request, const speech::Transcription& done) {
  HttpResponse response;
  json::Object body;
  switch (request.format) {
    case SpeechFormat::kText:
      response.content_type = "text/plain; charset=utf-8";
      response.body = done.text() + "\n";
      return response;
    case SpeechFormat::kSrt:
      response.content_type = "text/plain; charset=utf-8";
      response.body = speech::to_srt(done.segments());
      return response;
    case SpeechFormat::kVtt:
      response.content_type = "text/vtt; charset=utf-8";
      response.body = speech::to_vtt(done.segments());
      return response;
    case SpeechFormat::kVerbose:
      body["task"] = request.options.translate ? "translate" : "transcribe";
      body["language"] = std::string(speech::language_name(done.language()));
      body["duration"] = rounded(done.duration());
      body["text"] = done.text();
      if (request.segments) body["segments"] = segments_json(done);
      if (request.options.words) body["words"] = words_json(done);
      break;
    case SpeechFormat::kJson:
      body["text"] = done.text();
      break;
  }
  body["usage"] = usage_of_sound(done);
  response.body = json::write(json::Value(std::move(body)));
  return response;
}

std::string speech_stream_delta(const std::string& text) {
  json::Object event;
  event["type"] = "transcript.text.delta";
  event["delta"] = text;
  std::string out;
  append_event(json::Value(std::move(event)), out);
  return out;
}

std::string speech_stream_end(const speech::Transcription& done) {
  json::Object event;
  event["type"] = "transcript.text.done";
  event["text"] = done.text();
  event["usage"] = usage_of_sound(done);
  std::string out;
  append_event(json::Value(std::move(event)), out);
  return out;
}

}  // namespace freshet::server
