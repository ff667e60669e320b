#include "server/speech_service.h"

#include <atomic>
#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "media/audio.h"
#include "server/speech_format.h"
#include "tokenizer/tokenizer.h"

namespace freshet::server {
namespace {

// One transcription. All but gone() and the engine's callbacks runs on the service's thread; at
// most one of the engine's requests is open, and its callbacks come before its end.
class SpeechAnswer : public std::enable_shared_from_this<SpeechAnswer> {
 public:
  SpeechAnswer(App& app, SpeechService& service, App::Exchanges exchange, SpeechRequest request)
      : app_(app),
        service_(service),
        exchange_(std::move(exchange)),
        request_(std::move(request)) {}
  ~SpeechAnswer() {
    if (admitted_ >= 0) service_.leave(admitted_);
  }

  void run(std::string_view sound) {
    const std::span bytes(reinterpret_cast<const uint8_t*>(sound.data()), sound.size());
    const media::AudioLimits limits{.encoded_bytes = kMaxSoundBytes, .seconds = kMaxSoundSeconds};
    const speech::SpeechModel& model = service_.model();
    auto samples = media::decode_audio_at(bytes, model.mel.rate, limits);
    if (!samples.ok()) return fail(bad_request("file", "'file': " + samples.status().message()));
    if (samples->empty()) return fail(bad_request("file", "'file' holds no sound"));
    const auto seconds = static_cast<int64_t>(samples->size()) / model.mel.rate + 1;
    if (!service_.admit(seconds))
      return fail({503, "too many sounds are being transcribed: try again later", ""});
    admitted_ = seconds;
    speech::TranscribeOptions& options = request_.options;
    const double length = static_cast<double>(samples->size()) / model.mel.rate;
    options.timestamps = options.timestamps || length > model.window_seconds();
    transcription_.emplace(model, app_.engine().tokenizer(), options, std::move(*samples));
    exchange_->on_gone([weak = weak_from_this()] {
      if (auto self = weak.lock()) self->gone();
    });
    next();
  }

 private:
  void next() {
    if (gone_ || exchange_->gone()) return;
    Request request = transcription_->next_window();
    app_.set_tenant(exchange_->request(), {}, request);
    ids_.clear();
    error_ = {};
    record_ = {};
    record_.arrival = Clock::now();
    decoder_.emplace(app_.engine().tokenizer());
    const auto self = shared_from_this();
    request.on_delta = [self](const Delta& d) { self->heard(d); };
    request.on_done = [self](const Usage& u) {
      self->record(u);
      self->service_.post([self] { self->window_done(); });
    };
    record_.max_tokens = request.params.max_tokens;
    auto submitted = app_.engine().submit(std::move(request));
    if (!submitted.ok()) {
      if (submitted.status().code() == StatusCode::kResourceExhausted) app_.metrics().refused();
      return fail(from_status(submitted.status()));
    }
    engine_request_ = *submitted;
    if (gone_) app_.engine().cancel(*submitted);
  }

  // On the step thread.
  void heard(const Delta& d) {
    const auto now = Clock::now();
    if (record_.generation_tokens == 0) record_.first_token = now;
    record_.last_token = now;
    record_.generation_tokens += static_cast<int>(d.ids.size());
    ids_.insert(ids_.end(), d.ids.begin(), d.ids.end());
    if (d.finish != FinishReason::kNone) record_.finish = d.finish;
    if (d.finish == FinishReason::kError) error_ = from_status(d.error);
    if (d.finish == FinishReason::kCancelled) error_ = {503, "the request was cancelled", ""};
    if (!request_.stream || request_.options.timestamps) return;
    service_.post([self = shared_from_this(), ids = d.ids] { self->show(ids); });
  }

  void record(const Usage& usage) {
    record_.end = Clock::now();
    record_.prompt_tokens = usage.prompt_tokens;
    record_.preemptions = usage.preemptions;
    record_.longest_sample = record_.generation_tokens;
    for (const auto& [reason, seconds] : usage.waited) record_.queue_s += seconds;
    app_.metrics().finished(record_);
  }

  // Words of a window without timestamps are shown as they arrive.
  void show(const std::vector<int32_t>& ids) {
    std::string text;
    for (const int32_t id : ids) {
      if (id < service_.model().tokens.end) text += decoder_->push(id);
    }
    write(text);
  }

  void window_done() {
    if (error_) return fail(*error_);
    if (gone_) return;
    const size_t before = transcription_->segments().size();
    transcription_->take(ids_);
    if (request_.stream && request_.options.timestamps) {
      const auto& all = transcription_->segments();
      for (size_t i = before; i < all.size(); ++i) write(all[i].text);
    } else if (request_.stream) {
      write(decoder_->finish());
    }
    if (!transcription_->done()) return next();
    if (request_.stream) {
      start_stream();
      exchange_->write(speech_stream_end(*transcription_));
      exchange_->finish();
    } else {
      exchange_->send(speech_response(request_, *transcription_));
    }
  }

  void write(std::string text) {
    if (!shown_) text.erase(0, std::min(text.find_first_not_of(" \n\r\t"), text.size()));
    if (text.empty()) return;
    shown_ = true;
    start_stream();
    exchange_->write(speech_stream_delta(text));
  }

  void start_stream() {
    if (std::exchange(streams_, true)) return;
    HttpResponse response;
    response.content_type = "text/event-stream; charset=utf-8";
    response.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
    exchange_->start(std::move(response));
  }

  void fail(const ApiError& error) {
    if (!streams_) return send_error(exchange_, error);
    std::string out;
    append_event(to_json(error), out);
    exchange_->write(std::move(out));
    exchange_->finish();
  }

  void gone() {
    gone_ = true;
    if (const uint64_t open = engine_request_) app_.engine().cancel(open);
  }

  App& app_;
  SpeechService& service_;
  const App::Exchanges exchange_;
  SpeechRequest request_;
  int64_t admitted_ = -1;  // seconds
  std::optional<speech::Transcription> transcription_;
  std::optional<tokenizer::StreamDecoder> decoder_;
  bool streams_ = false, shown_ = false;
  std::atomic<bool> gone_{false};
  std::atomic<uint64_t> engine_request_{0};
  // Of the open request.
  std::vector<int32_t> ids_;
  std::optional<ApiError> error_;
  RequestRecord record_;
};

}  // namespace

SpeechService::SpeechService(App& app, speech::SpeechModel model)
    : app_(app), model_(std::move(model)), thread_([this] { work(); }) {}

SpeechService::~SpeechService() {
  end();
}

void SpeechService::end() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void SpeechService::start(App::Exchanges exchange, SpeechRequest request, std::string_view sound) {
  {
    const std::lock_guard lock(mutex_);
    if (sounds_in_work_ >= kMaxSoundsInWork) {
      return send_error(exchange,
                        {503, "too many sounds are being transcribed: try again later", ""});
    }
  }
  auto answer =
      std::make_shared<SpeechAnswer>(app_, *this, std::move(exchange), std::move(request));
  post([answer = std::move(answer), sound] { answer->run(sound); });
}

void SpeechService::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    if (ends_) return;
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

bool SpeechService::admit(int64_t seconds) {
  const std::lock_guard lock(mutex_);
  if (seconds_in_work_ > 0 && seconds_in_work_ + seconds > kMaxSecondsInWork) return false;
  seconds_in_work_ += seconds;
  ++sounds_in_work_;
  return true;
}

void SpeechService::leave(int64_t seconds) {
  const std::lock_guard lock(mutex_);
  seconds_in_work_ -= seconds;
  --sounds_in_work_;
}

void SpeechService::work() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (ends_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace freshet::server
