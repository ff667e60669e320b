// Transcriptions of a server: decodes sounds, makes their features and drives their windows, on one
// thread of its own, so that long sounds hold up neither handlers nor streams.
//
// start() may be called from any thread. Sounds in work are limited in number and length; beyond
// that a request gets 503. If the client leaves, its transcription ends.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "server/app.h"
#include "speech/speech_model.h"
#include "speech/transcription.h"

namespace freshet::server {

constexpr size_t kMaxSoundBytes = size_t{25} << 20;  // as in OpenAI's API
constexpr int64_t kMaxSoundSeconds = 2 * 3600;
constexpr int64_t kMaxSecondsInWork = 8 * 3600;
constexpr size_t kMaxSoundsInWork = 64;

enum class SpeechFormat { kJson, kText, kVerbose, kSrt, kVtt };

struct SpeechRequest {
  speech::TranscribeOptions options;
  SpeechFormat format = SpeechFormat::kJson;
  bool stream = false;
  bool segments = true;  // in verbose JSON
  std::string model;
};

class SpeechService {
 public:
  SpeechService(App& app, speech::SpeechModel model);
  ~SpeechService();
  // Waits for the task at hand; later ones are dropped.
  void end();
  const speech::SpeechModel& model() const { return model_; }

  // `sound`: the file, a view of the exchange's body.
  void start(App::Exchanges exchange, SpeechRequest request, std::string_view sound);

  // For the transcriptions.
  void post(std::function<void()> task);
  bool admit(int64_t seconds);  // false: too much is in work
  void leave(int64_t seconds);

 private:
  void work();

  App& app_;
  const speech::SpeechModel model_;
  std::mutex mutex_;  // of all below
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  int64_t seconds_in_work_ = 0;
  size_t sounds_in_work_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace freshet::server
