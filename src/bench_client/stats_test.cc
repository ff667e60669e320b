#include "bench_client/stats.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include "base/json.h"
#include "bench_client/arrivals.h"
#include "bench_client/random.h"
#include "bench_client/report.h"
#include "bench_client/svg_plot.h"

namespace freshet::bench_client {
namespace {

// Results of NumPy and SciPy (tools/golden_bench.py).
const json::Value& expected() {
  static const json::Value value =
      json::parse_file(FRESHET_SOURCE_DIR "/tests/data/bench_client/expected.json").value();
  return value;
}

std::vector<double> doubles(const json::Value& v) {
  std::vector<double> out;
  for (const json::Value& e : v.as_array()) out.push_back(e.as_double());
  return out;
}

void expect_close(double got, double wanted, const std::string& what) {
  EXPECT_NEAR(got, wanted, 1e-9 * std::max(1e-3, std::abs(wanted))) << what;
}

TEST(Stats, AgreeWithNumPy) {
  for (const json::Value& c : expected().find("statistics")->as_array()) {
    const std::string name = c.get_string("name", "");
    const std::vector<double> percents = doubles(*c.find("percents"));
    const std::vector<double> wanted = doubles(*c.find("percentiles"));
    const Summary s = summarise(doubles(*c.find("values")), percents);
    expect_close(s.mean, c.get_double("mean", NAN), name);
    expect_close(s.median, c.get_double("median", NAN), name);
    // Far from zero, the deviation in double precision is itself inexact.
    EXPECT_NEAR(s.standard_deviation, c.get_double("std", NAN), 1e-7) << name;
    ASSERT_EQ(s.percentiles.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i)
      expect_close(s.percentiles[i].second, wanted[i], name + " p" + std::to_string(percents[i]));
  }
}

TEST(Stats, NothingIsNought) {
  const Summary s = summarise({}, std::vector<double>{99.0});
  EXPECT_EQ(s.mean, 0.0);
  EXPECT_EQ(s.percentiles.front().second, 0.0);
}

// Counts in ten equally likely bins of a distribution; 27.88 is the 0.999 quantile of chi-square
// with nine degrees of freedom.
void expect_distribution(const std::vector<double>& values, const std::vector<double>& deciles,
                         const std::string& what) {
  std::vector<double> counts(10, 0.0);
  for (const double v : values)
    ++counts[static_cast<size_t>(std::upper_bound(deciles.begin(), deciles.end(), v) -
                                 deciles.begin())];
  const double wanted = static_cast<double>(values.size()) / 10.0;
  double chi_square = 0.0;
  for (const double c : counts) chi_square += (c - wanted) * (c - wanted) / wanted;
  EXPECT_LT(chi_square, 27.88) << what;
}

TEST(Random, GammaFollowsItsDistribution) {
  for (const json::Value& c : expected().find("gammas")->as_array()) {
    const double shape = c.get_double("shape", NAN);
    Random random(5, Stream::kArrivals);
    std::vector<double> draws(20000);
    for (double& d : draws) d = random.gamma(shape, 1.0 / shape);
    expect_distribution(draws, doubles(*c.find("deciles")), "shape " + std::to_string(shape));
  }
}

TEST(Random, WholeNumbersAreEven) {
  Random random(1, Stream::kLengths);
  std::vector<double> draws(20000);
  for (double& d : draws) d = static_cast<double>(random.between(-5, 4));
  expect_distribution(draws, {-4.5, -3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5}, "between");
  for (int i = 0; i < 100; ++i) EXPECT_EQ(random.below(1), 0u);
}

TEST(Arrivals, GapsFollowTheGamma) {
  for (const json::Value& c : expected().find("gammas")->as_array()) {
    ArrivalOptions o;
    o.rate = 20.0;
    o.burstiness = c.get_double("shape", NAN);
    if (o.burstiness < 0.5) continue;  // scaling to the exact end changes its many tiny gaps
    o.seed = 3;
    const std::vector<double> times = arrival_times(20000, o);
    EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
    EXPECT_NEAR(times.back(), 1000.0, 1e-6);
    std::vector<double> gaps;
    for (size_t i = 0; i < times.size(); ++i)
      gaps.push_back((times[i] - (i > 0 ? times[i - 1] : 0.0)) * o.rate);
    expect_distribution(gaps, doubles(*c.find("deciles")), "burstiness");
    // Gaps are independent of previous gaps.
    double correlation = 0.0;
    for (size_t i = 1; i < gaps.size(); ++i) correlation += (gaps[i] - 1) * (gaps[i - 1] - 1);
    correlation *= o.burstiness / static_cast<double>(gaps.size());
    EXPECT_LT(std::abs(correlation), 0.03);
  }
}

TEST(Arrivals, RatesAndSeeds) {
  ArrivalOptions o;
  EXPECT_EQ(arrival_times(3, o), (std::vector<double>{0, 0, 0}));
  o.rate = 2.0;
  o.burstiness = INFINITY;
  EXPECT_EQ(arrival_times(4, o), (std::vector<double>{0.5, 1.0, 1.5, 2.0}));
  o.burstiness = 1.0;
  const auto once = arrival_times(50, o);
  EXPECT_EQ(once, arrival_times(50, o));
  o.seed = 1;
  EXPECT_NE(once, arrival_times(50, o));
  o.rate = INFINITY;
  o.ramp_up = RampUp::kLinear;
  o.start_rate = 1.0;
  o.end_rate = 9.0;
  o.burstiness = INFINITY;
  const auto ramp = arrival_times(5, o);
  EXPECT_NEAR(ramp[1], 1.0 + 1.0 / 3.0, 1e-12);
  EXPECT_NEAR(ramp[4], 1.0 + 1.0 / 3 + 1.0 / 5 + 1.0 / 7 + 1.0 / 9, 1e-12);
  o.ramp_up = RampUp::kExponential;
  EXPECT_NEAR(arrival_times(3, o)[1], 1.0 + 1.0 / 3.0, 1e-12);
  EXPECT_TRUE(check(o).ok());
  o.start_rate = 0.0;
  EXPECT_FALSE(check(o).ok());
  o = {};
  o.rate = 0.0;
  EXPECT_FALSE(check(o).ok());
  o.rate = NAN;
  EXPECT_FALSE(check(o).ok());
  o.rate = 1.0;
  o.burstiness = 0.0;
  EXPECT_FALSE(check(o).ok());
}

BenchRun made_up_run() {
  const json::Value& r = *expected().find("run");
  BenchRun run;
  run.duration = r.find("keys")->get_double("duration", NAN);
  run.request_rate = INFINITY;
  run.goodput = parse_goodput({"ttft:100", "tpot:22"}).value();
  for (const json::Value& q : r.find("requests")->as_array()) {
    Outcome o;
    o.success = q.get_bool("success", false);
    o.arrival = q.get_double("arrival", NAN);
    o.start = q.get_double("start", NAN);
    o.ttft = q.get_double("ttft", NAN);
    o.latency = q.get_double("latency", NAN);
    o.itl = doubles(*q.find("itl"));
    o.input_tokens = static_cast<int>(q.get_int("input_tokens", -1));
    o.output_tokens = static_cast<int>(q.get_int("output_tokens", -1));
    run.outcomes.push_back(std::move(o));
  }
  return run;
}

TEST(Report, HasTheNumbersAndKeysOfVllm) {
  const BenchRun run = made_up_run();
  const auto selection = parse_selection("ttft,tpot,itl,e2el,client_queue_time", "50,99.9").value();
  const json::Value result = result_json(run, selection, false);
  for (const auto& [key, wanted] : expected().find("run")->find("keys")->as_object()) {
    ASSERT_NE(result.find(key), nullptr) << key;
    expect_close(result.find(key)->as_double(), wanted.as_double(), key);
  }
  EXPECT_EQ(result.get_string("request_rate", ""), "inf");
  EXPECT_TRUE(result.find("max_concurrency")->is_null());
  EXPECT_EQ(result.find("ttfts"), nullptr);
  const json::Value detailed = result_json(run, selection, true);
  for (const char* key :
       {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"})
    EXPECT_EQ(detailed.find(key)->as_array().size(), run.outcomes.size()) << key;
}

TEST(Report, TableIsLaidOutAsVllmDoes) {
  const std::string text = table(made_up_run(), {});
  EXPECT_TRUE(text.starts_with("============ Serving Benchmark Result ============\n"));
  EXPECT_NE(text.find("Successful requests:                     36        \n"), std::string::npos);
  EXPECT_NE(text.find("Failed requests:                         4         \n"), std::string::npos);
  EXPECT_NE(text.find("---------------Time to First Token----------------\n"), std::string::npos);
  EXPECT_NE(text.find("-----Time per Output Token (excl. 1st token)------\n"), std::string::npos);
  EXPECT_NE(text.find("\nP99 ITL (ms):"), std::string::npos);
  EXPECT_EQ(text.find("E2EL"), std::string::npos);
  EXPECT_TRUE(text.ends_with("==================================================\n"));
}

TEST(Report, EmptyRunsDoNotDivideByNought) {
  BenchRun run;
  run.outcomes.resize(3);
  const json::Value o = result_json(run, {}, true);
  EXPECT_EQ(o.get_int("failed", 0), 3);
  EXPECT_EQ(o.get_double("output_throughput", -1), 0.0);
  EXPECT_NE(plot(run, "nothing").find("</svg>"), std::string::npos);
}

TEST(Report, RefusesWhatItDoesNotKnow) {
  for (const char* bad : {"ttft", "ttft:", "ttft:x", "itl:5", "tpot:-1", ":5", "ttft:nan"})
    EXPECT_FALSE(parse_goodput({bad}).ok()) << bad;
  EXPECT_FALSE(parse_selection("ttft,foo", "99").ok());
  EXPECT_FALSE(parse_selection("ttft", "101").ok());
  EXPECT_FALSE(parse_selection("ttft", "99,").ok());
}

TEST(Report, ReadsSpeculationCounters) {
  const char* text =
      "# HELP vllm:spec_decode_num_drafts_total x\n"
      "vllm:spec_decode_num_drafts_total{engine=\"0\",model_name=\"m\"} 10.0\n"
      "vllm:spec_decode_num_draft_tokens_total{engine=\"0\"} 30\n"
      "vllm:spec_decode_num_accepted_tokens_total{engine=\"0\"} 1.5e1\n"
      "vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"1\"} 5\n";
  const auto s = parse_spec_decode(text);
  ASSERT_TRUE(s);
  EXPECT_EQ(s->drafts, 10);
  EXPECT_EQ(s->draft_tokens, 30);
  EXPECT_EQ(s->accepted_tokens, 15);
  EXPECT_EQ(s->accepted_at.at(1), 5);
  EXPECT_FALSE(parse_spec_decode("vllm:generation_tokens_total 5\n"));
}

TEST(Plot, CumulativeIsTheShareAtOrBelow) {
  std::vector<double> values;
  Random random(9, Stream::kTokens);
  for (int i = 0; i < 5000; ++i) values.push_back(random.gamma(2.0, 1.0));
  const auto points = cumulative(values);
  EXPECT_LE(points.size(), 401u);
  for (const auto& [x, share] : points) {
    const auto below =
        std::count_if(values.begin(), values.end(), [&](double v) { return v <= x; });
    if (share == 0.0) continue;
    EXPECT_NEAR(static_cast<double>(below) / 5000.0, share, 1e-12);
  }
  EXPECT_EQ(points.back().second, 1.0);
  EXPECT_EQ(points.back().first, *std::max_element(values.begin(), values.end()));
}

TEST(Plot, EscapesText) {
  const std::string picture =
      svg("a<b>&\"c\"", "d\x1b", {{"<t>", "s", {{"n", {{0, 1}, {1, 2}}}}, 0, false}});
  EXPECT_EQ(picture.find("<b>"), std::string::npos);
  EXPECT_EQ(picture.find("<t>"), std::string::npos);
  EXPECT_NE(picture.find("a&lt;b&gt;&amp;&#34;c&#34;"), std::string::npos);
  EXPECT_EQ(picture.find("nan"), std::string::npos);
  EXPECT_EQ(picture.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace freshet::bench_client
