"""Fields of OpenAI's, vLLM's and llama-server's requests: honoured, or refused by name."""
import json
import unittest
import unittest.mock

from serving import Case

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": "a", "max_tokens": 4, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"k": {"enum": ["zq"]}}, "required": ["k"],
          "additionalProperties": False}


class Fields(Case):
    def post(self, path, body, **more):
        return self.server.post(path, {**body, **more})

    def chat(self, **more):
        status, answer = self.post("/v1/chat/completions", CHAT, **more)
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]

    def stream(self, path, body, **more):
        _, _, data = self.server.request("POST", path, {**body, "stream": True, **more})
        lines = [line[6:] for line in data.decode().split("\n\n") if line]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def test_response_format_with_a_schema(self):
        for form in ({"type": "json_object", "schema": SCHEMA},
                     {"type": "json_schema", "schema": SCHEMA},
                     {"type": "json_schema", "json_schema": {"name": "k", "schema": SCHEMA}}):
            text = self.chat(response_format=form, max_tokens=60)["message"]["content"]
            self.assertEqual(json.loads(text), {"k": "zq"}, form)
        self.assert_error(self.post("/v1/chat/completions", CHAT, response_format={
            "type": "json_object", "schema": {"uniqueItems": True}}), 400, "response_format")

    def test_llama_structures_on_openai_routes(self):
        text = self.chat(json_schema=SCHEMA, max_tokens=60)["message"]["content"]
        self.assertEqual(json.loads(text), {"k": "zq"})
        self.assertEqual(self.chat(grammar='root ::= "xy"')["message"]["content"], "xy")

    def test_errors_name_the_structure_that_was_sent(self):
        for name, value in (("structured_outputs", {"grammar": "root ::= ("}), ("guided_regex", "("),
                            ("guided_json", {"uniqueItems": True}), ("grammar", "root ::= ("),
                            ("json_schema", {"uniqueItems": True}),
                            ("response_format", {"type": "json_schema", "json_schema": {
                                "name": "x", "schema": {"uniqueItems": True}}})):
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT),
                               ("/completion", TEXT)):
                self.assert_error(self.post(path, body, **{name: value}), 400, name)
        self.assert_error(self.post("/v1/responses", {"input": "a"}, text={"format": {
            "type": "json_schema", "name": "x", "schema": {"uniqueItems": True}}}), 400, "text.format")
        self.assert_error(self.post("/v1/responses", {"input": "a"}, structured_outputs={
            "regex": "("}), 400, "structured_outputs")
        self.assert_error(self.post("/v1/completions", TEXT, grammar='root ::= "a"',
                                    guided_regex="a"), 400, "grammar", "combined")
        tools = [{"type": "function", "function": {"name": "v", "parameters": {"uniqueItems": True,
                                                                               "type": "array"}}}]
        self.assert_error(self.post("/v1/chat/completions", CHAT, tools=tools,
                                    tool_choice="required"), 400, "tools", "'v'")

    def test_errors_name_the_limit_that_was_sent(self):
        for path, body, name in (("/v1/chat/completions", CHAT, "max_completion_tokens"),
                                 ("/v1/chat/completions", CHAT, "n_predict"),
                                 ("/completion", {"prompt": "a"}, "n_predict"),
                                 ("/completion", {"prompt": "a"}, "repeat_penalty"),
                                 ("/v1/responses", {"input": "a"}, "max_output_tokens")):
            self.assert_error(self.post(path, body, **{name: "x"}), 400, name)
        self.assert_error(self.post("/v1/responses", {"input": "a"}, reasoning={"effort": 1}), 400,
                          "reasoning.effort")
        self.assert_error(self.post("/tokenize", {"content": "word " * 2000000}), 400, "content")

    def test_what_is_refused(self):
        for name, value in (
                ("audio", {"voice": "a", "format": "wav"}), ("function_call", {"name": "f"}),
                ("modalities", ["text", "audio"]), ("moderation", {}), ("web_search_options", {}),
                ("guided_whitespace_pattern", " "), ("kv_transfer_params", {"a": 1}),
                ("repetition_detection", {}), ("thinking_token_budget", 5),
                ("truncation_side", "right"), ("vllm_xargs", {"a": 1}), ("adaptive_target", 0.5),
                ("dry_multiplier", 1), ("dynatemp_range", 1), ("grammar_lazy", True),
                ("lora", [{"id": 0, "scale": 1}]), ("min_keep", 3), ("mirostat", 1), ("n_cmpl", 2),
                ("n_indent", 2), ("tfs_z", 0.5), ("top_n_sigma", 1), ("xtc_probability", 0.5)):
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT),
                               ("/completion", TEXT), ("/v1/responses", {"input": "a"})):
                self.assert_error(self.post(path, body, **{name: value}), 400, name)
        self.assert_error(self.post("/v1/completions", TEXT, repeat_penalty=1.1, repeat_last_n=64),
                          400, "repeat_last_n")
        for option in ("whitespace_pattern", "structural_tag"):
            self.assert_error(self.post("/v1/completions", TEXT, structured_outputs={
                "regex": "a", option: "x"}), 400, "structured_outputs", option)
        self.assert_error(self.post("/v1/chat/completions", CHAT, echo=True), 400, "echo")
        for name in ("max_tokens", "max_completion_tokens", "response_format", "messages",
                     "context_management"):
            self.assert_error(self.post("/v1/responses", {"input": "a"}, **{name: 5}), 400, name)
        self.assert_error(self.post("/v1/completions", TEXT, stream=True, stream_options={
            "include_usage": "yes"}), 400, "stream_options")
        self.assert_error(self.post("/v1/embeddings", {"input": "a"}, embed_dtype="float16"), 400,
                          "embed_dtype")

    def test_values_that_turn_a_field_off_pass(self):
        plain = self.chat()
        self.assertEqual(self.chat(
            modalities=["text"], function_call="none", functions=[], audio=None, lora=[],
            dry_multiplier=0, mirostat=0, min_keep=0, xtc_probability=0.5, xtc_threshold=0.6,
            top_n_sigma=-1, adaptive_target=-1, n_indent=0, truncation_side="left",
            repeat_last_n=64, cache_prompt=False, id_slot=-1, metadata={"a": "b"}, store=True,
            service_tier="auto", user="me", safety_identifier="x", prompt_cache_key="k",
            prediction={"type": "content", "content": "x"}, verbosity="low"), plain)
        _, answer = self.post("/v1/completions", TEXT, repeat_penalty=1.5, repeat_last_n=0)
        self.assertEqual(answer["choices"][0]["text"],
                         self.post("/v1/completions", TEXT)[1]["choices"][0]["text"])

    def test_usage_is_null_until_the_end(self):
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            chunks = self.stream(path, body, stream_options={"include_usage": True})
            self.assertGreater(len(chunks), 1)
            for chunk in chunks[:-1]:
                self.assertIsNone(chunk["usage"])
            self.assertGreater(chunks[-1]["usage"]["completion_tokens"], 0)
            self.assertEqual(chunks[-1]["choices"], [])
            for chunk in self.stream(path, body):
                self.assertNotIn("usage", chunk)

    def test_refusals_and_older_forms_in_history(self):
        def prompt(*messages):
            status, answer = self.server.post("/apply-template", {"messages": [
                {"role": "user", "content": "x"}, *messages, {"role": "user", "content": "y"}]})
            self.assertEqual(status, 200, answer)
            return answer["prompt"]
        plain = prompt({"role": "assistant", "content": "No."})
        self.assertEqual(prompt({"role": "assistant", "content": [
            {"type": "refusal", "refusal": "No."}]}), plain)
        self.assertEqual(prompt({"role": "assistant", "content": None, "refusal": "No."}), plain)
        self.assertEqual(prompt({"role": "assistant", "content": "No.", "refusal": None}), plain)
        status, answer = self.server.post("/v1/responses", {"max_output_tokens": 1, "input": [
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "y"}]})
        self.assertEqual(status, 200, answer)
        call = {"name": "f", "arguments": "{}"}
        self.assertEqual(
            prompt({"role": "assistant", "content": None, "function_call": call},
                   {"role": "function", "name": "f", "content": "1"}),
            prompt({"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_f", "type": "function", "function": call}]},
                   {"role": "tool", "tool_call_id": "call_f", "name": "f", "content": "1"}))

    def test_nothing_generated(self):
        for echo in (False, True):
            status, answer = self.server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 0,
                                                                  "echo": echo})
            self.assertEqual(status, 200, answer)
            self.assertEqual(answer["choices"][0]["text"], "Hello" if echo else "")
            self.assertEqual(answer["choices"][0]["finish_reason"], "length")
            self.assertEqual(answer["usage"]["completion_tokens"], 0)
        chunks = self.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 0},
                             stream_options={"include_usage": True})
        self.assertEqual([c["choices"][0]["finish_reason"] for c in chunks[:-1]], ["length"])
        self.assertEqual(chunks[0]["choices"][0]["text"], "")
        self.assertEqual(chunks[-1]["usage"]["completion_tokens"], 0)
        _, answer = self.server.post("/v1/generate", {"prompt": "Hello", "max_tokens": 0})
        self.assertEqual((answer["text"], answer["tokens_generated"]), ("", 0))

    def test_2048_inputs(self):
        status, answer = self.server.post("/v1/embeddings", {"input": [[5]] * 2048}, timeout=300)
        self.assertEqual(status, 200)
        self.assertEqual(len(answer["data"]), 2048)
        self.assert_error(self.server.post("/v1/embeddings", {"input": [[5]] * 2049}), 400, "input",
                          "2048")

    def test_characters_between_prompt_and_answer(self):
        """A prompt that ends inside a character, which the answer completes."""
        ids = self.server.post("/tokenize", {"content": "日"})[1]["tokens"]
        if len(ids) < 2:
            self.skipTest("one token is the whole character")
        force = {"logit_bias": {str(ids[-1]): 100}, "temperature": 0, "max_tokens": 1}
        for logprobs in ({}, {"logprobs": 0}):
            _, answer = self.server.post("/v1/completions", {"prompt": ids[:-1], "echo": True,
                                                             **force, **logprobs})
            choice = answer["choices"][0]
            self.assertEqual(choice["text"], "日")
        self.assertEqual(choice["logprobs"]["text_offset"], [0] * len(ids))
        _, answer = self.server.post("/v1/completions", {"prompt": ids[:-1], "echo": True,
                                                         "max_tokens": 0})
        self.assertEqual(answer["choices"][0]["text"], "\ufffd")
        _, answer = self.server.post("/v1/completions", {"prompt": ids[:-1], **force})
        self.assertNotIn("日", answer["choices"][0]["text"])

    def test_tokenize(self):
        eos = self.server.get("/props")[1]["eos_token"]
        whole = self.server.post("/tokenize", {"content": eos})[1]["tokens"]
        self.assertEqual(len(whole), 1)
        parts = self.server.post("/tokenize", {"content": eos, "parse_special": False})[1]["tokens"]
        self.assertGreater(len(parts), 1)
        self.assertEqual(self.server.post("/detokenize", {"tokens": parts})[1]["content"], eos)
        vllm = self.server.post("/tokenize", {"prompt": eos, "add_special_tokens": False})[1]
        self.assertEqual(vllm["tokens"], whole)
        self.assertEqual(self.server.post("/tokenize", {"prompt": "a"})[1]["tokens"],
                         self.server.post("/tokenize", {"content": "a", "add_special": True})[1][
                             "tokens"])
        pieces = self.server.post("/tokenize", {"content": "a日", "with_pieces": True})[1]["tokens"]
        spelled = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"])
                           for p in pieces)
        self.assertEqual(spelled.decode().strip(), "a日")
        self.assertEqual([p["id"] for p in pieces],
                         self.server.post("/tokenize", {"content": "a日"})[1]["tokens"])

    def test_llama_fields(self):
        def post(**more):
            status, answer = self.post("/completion", {"prompt": "Once", "n_predict": 4,
                                                       "temperature": 0, **more})
            self.assertEqual(status, 200, answer)
            return answer
        answer = post(n_probs=3, return_tokens=True)
        self.assertEqual([p["id"] for p in answer["completion_probabilities"]], answer["tokens"])
        for p in answer["completion_probabilities"]:
            self.assertEqual(bytes(p["bytes"]).decode(errors="replace"), p["token"])
            self.assertEqual(len(p["top_logprobs"]), 3)
            self.assertEqual(p["top_logprobs"][0]["id"], p["id"])
        self.assert_error(self.post("/completion", TEXT, n_probs=3, post_sampling_probs=True), 400,
                          "post_sampling_probs")
        self.assertEqual(set(post(response_fields=["content", "timings/predicted_n", "none"])),
                         {"content", "predicted_n"})
        ids = self.server.post("/tokenize", {"content": "Once upon", "add_special": True})[1]["tokens"]
        plain = post(prompt="Once upon a")
        tail = self.server.post("/tokenize", {"content": " a"})[1]["tokens"]
        self.assertEqual(post(prompt=ids + tail)["content"], post(prompt=[*ids, " a"])["content"])
        self.assertEqual(post(prompt={"prompt_string": "Once upon a"})["content"], plain["content"])
        self.assertEqual(post(temperature=5, seed=1, top_k=1, samplers=["temperature", "top_k"])[
            "content"], post()["content"])
        self.assertEqual(post(seed=1, top_k=1, temperature=1, samplers=["top_p"]),
                         {**post(seed=1, temperature=1), "timings": unittest.mock.ANY})
        self.assert_error(self.post("/completion", TEXT, samplers=["x"]), 400, "samplers")

    def test_predict_time(self):
        status, answer = self.server.post("/completion", {
            "prompt": "a", "n_predict": 1500, "ignore_eos": True, "t_max_predict_ms": 50,
            "grammar": 'root ::= "a\\n" "b"*'})
        self.assertEqual(status, 200, answer)
        self.assertEqual(answer["stop_type"], "limit")
        self.assertLess(answer["tokens_predicted"], 1500)

    def test_allowed_tools_and_distinct_names(self):
        def tool(name):
            return {"type": "function", "function": {"name": name}}
        for path, body, tools, choice in (
                ("/v1/chat/completions", CHAT, [tool("f"), tool("g")],
                 {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}),
                ("/v1/responses", {"input": "a", "temperature": 0},
                 [{"type": "function", "name": n, "parameters": None} for n in ("f", "g")],
                 {"type": "allowed_tools", "mode": "required",
                  "tools": [{"type": "function", "name": "g"}]})):
            more = {"max_tokens": 60} if "messages" in body else {"max_output_tokens": 60}
            status, answer = self.post(path, body, tools=tools, tool_choice=choice, **more)
            self.assertEqual(status, 200, answer)
            call = (answer["choices"][0]["message"]["tool_calls"][0]["function"]
                    if "choices" in answer else answer["output"][0])
            self.assertIn("name", call, answer)
            self.assertEqual((call["name"], json.loads(call["arguments"])), ("g", {}))
            self.assert_error(self.post(path, body, tools=[tools[0], tools[0]]), 400, "tools", "'f'")


class Scheme(Case):
    flags = ("--api-key", "k")

    def test_authorization(self):
        for header, status in (("Bearer k", 200), ("bearer k", 200), ("BEARER   k", 200),
                               ("Bearer  k", 200), ("Bearerk", 401), ("Basic k", 401), ("k", 401),
                               ("Bearer", 401), ("Bearer kk", 401)):
            got = self.server.request("GET", "/v1/models", headers={"Authorization": header})[0]
            self.assertEqual(got, status, header)


if __name__ == "__main__":
    unittest.main()
