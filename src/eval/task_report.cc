// The accuracies of a task file for people and for scripts.
#include <cmath>

#include "eval/statistics.h"
#include "eval/tasks.h"

namespace freshet::eval {
namespace {

json::Array pair_json(const Interval& i) {
  return {json::Value(i.low), json::Value(i.high)};
}

json::Object metric_json(const std::vector<ItemResult>& results,
                         const std::vector<ItemResult>& base, bool ItemResult::* correct) {
  int64_t right = 0, base_right = 0, only_base = 0, only_model = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    right += results[i].*correct ? 1 : 0;
    if (base.empty()) continue;
    base_right += base[i].*correct ? 1 : 0;
    only_base += base[i].*correct && !(results[i].*correct) ? 1 : 0;
    only_model += !(base[i].*correct) && results[i].*correct ? 1 : 0;
  }
  const auto items = std::ssize(results);
  const auto n = static_cast<double>(items);
  json::Object o;
  o["value"] = static_cast<double>(right) / n;
  o["interval"] = pair_json(wilson(right, items));
  if (base.empty()) return o;
  // The variance of a paired difference comes from the discordant items alone.
  const double difference = static_cast<double>(only_model - only_base) / n;
  const double share = static_cast<double>(only_model + only_base) / n;
  o["base"] = static_cast<double>(base_right) / n;
  o["base_interval"] = pair_json(wilson(base_right, items));
  o["difference"] = difference;
  o["standard_error"] = std::sqrt((share - difference * difference) / n);
  o["only_base"] = only_base;
  o["only_model"] = only_model;
  o["mcnemar_p"] = mcnemar_exact(only_base, only_model);
  o["minimum_detectable_difference"] = minimum_detectable_difference(only_base + only_model, items);
  return o;
}

}  // namespace

json::Object task_json(const TaskFile& file, const std::vector<ItemResult>& results,
                       const std::vector<ItemResult>& base) {
  json::Object o;
  o["file"] = file.name;
  o["kind"] = file.choices ? "multiple_choice" : "exact_match";
  o["items"] = results.size();
  if (file.choices) {
    o["acc"] = metric_json(results, base, &ItemResult::correct);
    o["acc_norm"] = metric_json(results, base, &ItemResult::correct_normalised);
  } else {
    o["exact_match"] = metric_json(results, base, &ItemResult::correct);
  }
  return o;
}

std::string task_text(const json::Object& task) {
  std::string text = fmt::format("{}: {} items\n", task.find("file")->as_string(),
                                 task.find("items")->number_text());
  for (const auto& [key, metric] : task) {
    if (!metric.is_object()) continue;
    const auto percent = [&metric](std::string_view name) {
      return 100.0 * metric.get_double(name, 0.0);
    };
    const json::Array& interval = metric.find("interval")->as_array();
    text += fmt::format("  {:<11} {:.2f} % [{:.2f}, {:.2f}]", key, percent("value"),
                        100.0 * interval[0].as_double(), 100.0 * interval[1].as_double());
    if (metric.find("base") != nullptr) {
      text += fmt::format(
          "; base {:.2f} %, difference {:+.2f} +- {:.2f}; {} right only there, {} only here: p = "
          "{:.3g}; minimum detectable difference {:.2f}",
          percent("base"), percent("difference"), percent("standard_error"),
          metric.get_int("only_base", 0), metric.get_int("only_model", 0),
          metric.get_double("mcnemar_p", 1.0), percent("minimum_detectable_difference"));
    }
    text += '\n';
  }
  return text;
}

json::Object item_json(const TaskFile& file, size_t item, const ItemResult& result) {
  json::Object o;
  o["file"] = file.name;
  o["id"] = file.items[item].id;
  o["correct"] = result.correct;
  if (file.choices) {
    o["correct_norm"] = result.correct_normalised;
    json::Array values;
    for (const double v : result.log_likelihoods) values.emplace_back(v);
    o["log_likelihoods"] = std::move(values);
  } else {
    o["output"] = result.output;
    o["extracted"] = result.extracted;
  }
  return o;
}

}  // namespace freshet::eval
