// Transcripts of a seeded Whisper whose windows are one second long, against what transformers'
// generate() makes of the same sounds: rules, windows, languages and tasks.
#include <array>
#include <cmath>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "freshet/engine.h"
#include "speech/captions.h"
#include "speech/languages.h"
#include "speech/transcription.h"
#include "tokenizer/tokenizer.h"

namespace freshet::speech {
namespace {

std::string speech_folder() {
  return std::string(FRESHET_UNPACKED_DATA) + "/seeded/whisper-speech";
}

// Tones that change every 0.2 s, and noise.
std::vector<float> sound_of(int64_t seed, int64_t samples) {
  std::vector<float> out;
  int64_t state = seed, period = 1, loud = 0;
  const auto advance = [&] { state = (state * 1103515245 + 12345) % (int64_t{1} << 31); };
  for (int64_t i = 0; i < samples; ++i) {
    if (i % 3200 == 0) {
      advance();
      period = 20 + (state >> 16) % 200;
      loud = 2000 + (state >> 8) % 12000;
    }
    advance();
    const int64_t tone = i % period < period / 2 ? loud : -loud;
    out.push_back(static_cast<float>(tone + (state >> 16) % 2001 - 1000) / 32768.0f);
  }
  return out;
}

// Returns the temperatures of the requests that were made.
std::vector<float> run_all(Engine& engine, Transcription& work) {
  std::vector<float> temperatures;
  while (!work.done()) {
    Request request = work.next_window();
    temperatures.push_back(request.params.temperature);
    std::vector<int32_t> ids;
    std::promise<void> done;
    request.on_delta = [&](const Delta& d) {
      ids.insert(ids.end(), d.ids.begin(), d.ids.end());
      EXPECT_NE(d.finish, FinishReason::kError) << d.error.message();
    };
    request.on_done = [&](const Usage&) { done.set_value(); };
    const auto submitted = engine.submit(std::move(request));
    EXPECT_TRUE(submitted.ok()) << submitted.status().message();
    if (!submitted.ok()) break;
    done.get_future().wait();
    work.take(ids);
  }
  return temperatures;
}

std::unique_ptr<Engine> speech_engine() {
  EngineOptions options;
  options.model = speech_folder();
  options.threads = 2;
  options.reference = true;
  auto engine = Engine::load(options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(*engine) : nullptr;
}

// The tokens up to the timestamp that ends a segment: transformers adds the one that begins the
// next to the last of a window.
std::vector<int32_t> without_next(std::vector<int32_t> ids, int32_t first_timestamp) {
  const size_t n = ids.size();
  if (n >= 3 && ids[n - 1] >= first_timestamp && ids[n - 2] >= first_timestamp) ids.pop_back();
  return ids;
}

TEST(Transcription, WritesWhatTransformersWrites) {
  const auto engine = speech_engine();
  ASSERT_NE(engine, nullptr);
  const auto model = read_speech_model(*engine);
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(model->window_frames, 100);
  const auto cases = json::parse_file(speech_folder() + "/expected.json");
  ASSERT_TRUE(cases.ok());
  for (const json::Value& c : cases->as_array()) {
    TranscribeOptions options;
    options.language = c.get_string("language", "");
    options.translate = c.get_string("task", "") == "translate";
    options.timestamps = c.find("timestamps")->as_bool();
    options.prompt = prompt_tokens(*model, engine->tokenizer(), c.get_string("prompt", ""));
    options.condition_on_previous_text = c.find("condition_on_previous_text") != nullptr;
    if (const json::Value* logprob = c.find("logprob_threshold"); logprob != nullptr) {
      options.retries = {
          .temperature_increment = 0.0f,
          .logprob = static_cast<float>(logprob->as_double()),
          .no_speech = static_cast<float>(c.find("no_speech_threshold")->as_double())};
    }
    // Of some sounds also the times of tokens.
    options.words = c.find("segments")->as_array().front().find("times") != nullptr;
    const int64_t seed = c.find("seed")->as_int64().value();
    Transcription work(*model, engine->tokenizer(), options,
                       sound_of(seed, c.find("samples")->as_int64().value()));
    run_all(*engine, work);
    const json::Array& wanted = c.find("segments")->as_array();
    ASSERT_EQ(work.segments().size(), wanted.size()) << "sound " << seed;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const Segment& got = work.segments()[i];
      std::vector<int32_t> tokens;
      for (const json::Value& id : wanted[i].find("tokens")->as_array())
        tokens.push_back(static_cast<int32_t>(id.as_int64().value()));
      EXPECT_EQ(got.tokens, without_next(tokens, model->tokens.first_timestamp()))
          << "sound " << seed << ", segment " << i;
      EXPECT_NEAR(got.start, wanted[i].find("start")->as_double(), 1e-3);
      EXPECT_NEAR(got.end, wanted[i].find("end")->as_double(), 1e-3);
      const json::Value* const times = wanted[i].find("times");
      for (size_t t = 0; times != nullptr && t < got.tokens.size(); ++t) {
        ASSERT_EQ(got.token_ends.size(), got.tokens.size());
        EXPECT_NEAR(got.token_ends[t], times->as_array()[t].as_double(), 0.006)
            << "sound " << seed << ", segment " << i << ", token " << t;
      }
      EXPECT_EQ(got.words.empty(), !options.words || got.text.empty());
      EXPECT_GT(got.no_speech_prob, 0.0);
      EXPECT_LT(got.avg_logprob, 0.0);
    }
    const json::Value* detected = c.find("detected");
    if (detected->is_number()) {
      EXPECT_EQ(model->tokens.language(work.language()), detected->as_int64().value());
    }
  }
}

// Words as transformers' _combine_tokens_into_words() groups them.
TEST(Transcription, GroupsTokensToWords) {
  const auto tokenizer = Tokenizer::load(speech_folder());
  ASSERT_TRUE(tokenizer.ok());
  const auto words = [&](const std::string& text, const std::string& language) {
    const std::vector<int32_t> ids =
        tokenizer->encode(text, {.add_special = false, .parse_special = false});
    std::vector<double> begins, ends;
    for (size_t i = 0; i < ids.size(); ++i) {
      begins.push_back(static_cast<double>(i));
      ends.push_back(static_cast<double>(i + 1));
    }
    std::string out;
    double last = 0.0;
    for (const Word& word : words_of(*tokenizer, ids, begins, ends, language)) {
      EXPECT_LE(last, word.start);
      EXPECT_LT(word.start, word.end);
      last = word.end;
      out += word.text + "|";
    }
    EXPECT_EQ(last, static_cast<double>(ids.size()));
    return out;
  };
  EXPECT_EQ(words(" Well, it's \"so\" (they said): 3.5!", "en"),
            "Well,|it|'s|\"so\"|(they|said):|3|.5!|");
  EXPECT_EQ(words(" caf\u00e9 \u20ac5", "fr"), "caf\u00e9|\u20ac5|");
  EXPECT_EQ(words("\u4f60\u597d\u3002", "zh"), "\u4f60|\u597d\u3002|");
}

// Windows of several sounds in one batch, and of one alone.
TEST(Transcription, TheBatchChangesNothing) {
  const auto engine = speech_engine();
  ASSERT_NE(engine, nullptr);
  const auto model = read_speech_model(*engine);
  ASSERT_TRUE(model.ok());
  std::vector<std::vector<Segment>> alone(3), together(3);
  const auto transcribe = [&](size_t i, std::vector<std::vector<Segment>>& out) {
    Transcription work(*model, engine->tokenizer(),
                       {.temperature = i == 2 ? 0.7f : 0.0f, .seed = 3, .words = true},
                       sound_of(static_cast<int64_t>(i) + 1, 30'000));
    run_all(*engine, work);
    out[i] = work.segments();
  };
  for (size_t i = 0; i < 3; ++i) transcribe(i, alone);
  std::vector<std::future<void>> running;
  for (size_t i = 0; i < 3; ++i)
    running.push_back(std::async(std::launch::async, [&, i] { transcribe(i, together); }));
  for (auto& one : running) one.get();
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(alone[i].size(), together[i].size());
    for (size_t s = 0; s < alone[i].size(); ++s) {
      EXPECT_EQ(alone[i][s].tokens, together[i][s].tokens);
      // Together they find the encoder's output in the cache.
      EXPECT_EQ(alone[i][s].token_ends.size(), alone[i][s].tokens.size());
      EXPECT_EQ(alone[i][s].token_ends, together[i][s].token_ends);
    }
  }
}

// A window that stays unlikely is made at each temperature in turn, and kept at the last.
TEST(Transcription, MakesUnlikelyWindowsAgain) {
  const auto engine = speech_engine();
  ASSERT_NE(engine, nullptr);
  const auto model = read_speech_model(*engine);
  ASSERT_TRUE(model.ok());
  TranscribeOptions options;
  options.language = "en";
  options.timestamps = false;
  const auto temperatures = [&](const RetryOptions& retries) {
    options.retries = retries;
    Transcription work(*model, engine->tokenizer(), options, sound_of(1, 16'000));
    const std::vector<float> tried = run_all(*engine, work);
    EXPECT_EQ(work.segments().size(), 1u);
    EXPECT_FLOAT_EQ(work.segments().front().temperature, tried.back());
    return tried;
  };
  const std::vector<float> all{0.0f, 0.2f, 0.4f, 0.6f, 0.8f, 1.0f};
  const std::vector<float> tried = temperatures({});
  ASSERT_EQ(tried.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_NEAR(tried[i], all[i], 1e-6);
  // The encoder ran once.
  EXPECT_EQ(engine->stats().encoder.queries, 6);
  EXPECT_EQ(engine->stats().encoder.hits, 5);
  EXPECT_EQ(temperatures({.compression_ratio = 100.0f, .logprob = -20.0f}).size(), 1u);
  EXPECT_EQ(temperatures({.compression_ratio = 0.1f, .logprob = -20.0f}).size(), all.size());
  EXPECT_EQ(temperatures({.temperature_increment = 0.0f}).size(), 1u);
  const int64_t hits = engine->stats().encoder.hits;
  options.cache_salt = "another caller";
  EXPECT_EQ(temperatures({.temperature_increment = 0.0f}).size(), 1u);
  EXPECT_EQ(engine->stats().encoder.hits, hits);
}

SpeechTokens plain_tokens() {
  SpeechTokens t;
  t.end = 3;
  t.no_timestamps = 5;  // timestamps: 6 ... 9
  t.suppressed = {1};
  t.suppressed_at_begin = {2};
  t.max_initial_timestamp = 1;
  return t;
}

std::string allowed_after(const std::vector<int32_t>& output, std::vector<float> logits) {
  const SpeechTokens tokens = plain_tokens();
  WhisperRules rules(tokens, {.timestamps = true});
  rules.apply(output, logits.data(), std::ssize(logits));
  std::string allowed;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i])) allowed += std::to_string(i);
  }
  return allowed;
}

TEST(WhisperRules, TimestampsComeInPairsAndDoNotGoBack) {
  // Text so likely that no timestamp must come.
  const std::vector<float> text{9, 9, 9, 9, 9, 9, 0, 0, 0, 0};
  EXPECT_EQ(allowed_after({}, text), "67");           // a first timestamp, at most the second
  EXPECT_EQ(allowed_after({7}, text), "0234");        // then text
  EXPECT_EQ(allowed_after({7, 0}, text), "023489");   // or a later one
  EXPECT_EQ(allowed_after({7, 0, 8}, text), "3489");  // its twin, or the end
  EXPECT_EQ(allowed_after({7, 0, 8, 8}, text), "0234");
  // All timestamps together are likelier than any text.
  EXPECT_EQ(allowed_after({7, 0}, {1, 1, 1, 1, 1, 1, 0.9f, 0.9f, 0.9f, 0.9f}), "89");
}

TEST(Captions, HaveTimesAndNoEmptyLines) {
  Segment s;
  s.start = 3661.5;
  s.end = 3662.25;
  s.text = " One\n\n--> two ";
  Segment silent;
  silent.text = " ";
  const std::array all{s, silent};
  EXPECT_EQ(to_srt(all), "1\n01:01:01,500 --> 01:01:02,250\nOne -> two\n\n");
  EXPECT_EQ(to_vtt(all), "WEBVTT\n\n01:01:01.500 --> 01:01:02.250\nOne -> two\n\n");
}

TEST(Languages, AreKnownByCodeAndName) {
  EXPECT_EQ(language_code("de"), "de");
  EXPECT_EQ(language_code("German"), "de");
  EXPECT_EQ(language_code("castilian"), "es");
  EXPECT_EQ(language_code("klingon"), "");
  EXPECT_EQ(language_name("de"), "german");
}

}  // namespace
}  // namespace freshet::speech
