"""OpenAI's Responses API of `freshet serve`, through the official client.

usage: responses_test.py [Class[.test] ...]    needs FRESHET, FRESHET_SOURCE_DIR and PyPI's openai
"""
import json
import os
import sys
import unittest

try:
    import jsonschema
    import openai
except ImportError:
    print("the openai client is not installed here")
    sys.exit(77)

from client_test import HELLO, ClientCase, Person

WEATHER = {"type": "function", "name": "get_weather", "description": "The weather of a city",
           "parameters": {"type": "object",
                          "properties": {"city": {"type": "string", "maxLength": 20},
                                         "unit": {"enum": ["C", "F"]}},
                          "required": ["city", "unit"], "additionalProperties": False}}
CLOCK = {"type": "function", "name": "get_time",
         "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}},
                        "required": ["zone"], "additionalProperties": False}}


class ResponsesCase(ClientCase):
    def respond(self, given="Hello there", **options):
        options.setdefault("max_output_tokens", 12)
        extra = options.pop("extra", {})
        return self.client.responses.create(model="default", input=given, extra_body=extra, **options)

    def refused(self, param, words="", **options):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.respond(options.pop("input", "Hello there"), **options)
        self.assertEqual(caught.exception.param, param)
        self.assertIn(words, str(caught.exception))


class Responses(ResponsesCase):
    def test_answer(self):
        answer = self.respond(temperature=0, metadata={"a": "b"}, extra={"ignore_eos": True})
        chat = self.chat(temperature=0, extra={"ignore_eos": True})
        self.assertEqual((answer.object, answer.model, answer.error), ("response", "default", None))
        self.assertEqual(answer.output_text, chat.choices[0].message.content)
        (message,) = answer.output
        self.assertEqual((message.type, message.role, message.status),
                         ("message", "assistant", "incomplete"))
        self.assertEqual(message.content[0].annotations, [])
        self.assertEqual((answer.status, answer.incomplete_details.reason),
                         ("incomplete", "max_output_tokens"))
        usage = answer.usage
        self.assertEqual((usage.input_tokens, usage.output_tokens, usage.total_tokens),
                         (chat.usage.prompt_tokens, 12, chat.usage.total_tokens))
        self.assertEqual(usage.output_tokens_details.reasoning_tokens, 0)
        self.assertEqual((answer.temperature, answer.max_output_tokens, answer.metadata),
                         (0, 12, {"a": "b"}))
        self.assertEqual((answer.tools, answer.tool_choice, answer.store), ([], "auto", False))

    def test_completed(self):
        word = self.respond(temperature=0, max_output_tokens=30).output_text.split()[3]
        answer = self.respond(temperature=0, max_output_tokens=30, extra={"stop": [word]})
        self.assertEqual((answer.status, answer.output[0].status), ("completed", "completed"))
        self.assertIsNone(answer.incomplete_details)
        self.assertNotIn(word, answer.output_text)

    def test_input_items(self):
        """The items of `input` give the same prompt as the equivalent chat."""
        items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello "},
                                              {"type": "input_text", "text": "there"}]},
                 {"type": "reasoning", "id": "r", "summary": []},
                 {"type": "message", "id": "m", "status": "completed", "role": "assistant",
                  "content": [{"type": "output_text", "text": "Hi.", "annotations": []}]},
                 {"type": "message", "role": "user", "content": "What time is it?"},
                 {"type": "function_call", "call_id": "c1", "name": "get_time",
                  "arguments": "{\"zone\": \"UTC\"}"},
                 {"type": "function_call", "call_id": "c2", "name": "get_time",
                  "arguments": "{\"zone\": \"CET\"}"},
                 {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
                 {"type": "function_call_output", "call_id": "c2",
                  "output": [{"type": "input_text", "text": "13:00"}]}]
        calls = [{"id": f"c{i}", "type": "function", "function": {
            "name": "get_time", "arguments": json.dumps({"zone": zone})}}
            for i, zone in ((1, "UTC"), (2, "CET"))]
        messages = [{"role": "system", "content": "Be brief."}, *HELLO,
                    {"role": "assistant", "content": "Hi."},
                    {"role": "user", "content": "What time is it?"},
                    {"role": "assistant", "content": "", "tool_calls": calls},
                    {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
                    {"role": "tool", "tool_call_id": "c2", "content": "13:00"}]
        answer = self.respond(items, instructions="Be brief.", temperature=0)
        chat = self.chat(messages, temperature=0)
        self.assertEqual(answer.usage.input_tokens, chat.usage.prompt_tokens)
        self.assertEqual(answer.output_text, chat.choices[0].message.content)
        self.assertEqual(answer.instructions, "Be brief.")

    def test_output_goes_back_in(self):
        first = self.respond(temperature=0)
        items = [{"role": "user", "content": "Hello there"}, *first.output,
                 {"role": "user", "content": "Go on."}]
        answer = self.respond(items, temperature=0)
        chat = self.chat(HELLO + [{"role": "assistant", "content": first.output_text},
                                  {"role": "user", "content": "Go on."}], temperature=0)
        self.assertEqual(answer.usage.input_tokens, chat.usage.prompt_tokens)
        self.assertEqual(answer.output_text, chat.choices[0].message.content)

    def test_developer_is_system(self):
        """If the template has no developer role."""
        for role in ("developer", "system"):
            answer = self.chat([{"role": role, "content": "Be brief."}, *HELLO], max_tokens=1,
                               extra={"return_token_ids": True})
            if role == "developer":
                developer = answer.prompt_token_ids
        self.assertEqual(developer, answer.prompt_token_ids)

    def test_parse_with_pydantic(self):
        for seed in range(3):
            answer = self.client.responses.parse(model="default", input="Hello there",
                                                 text_format=Person, max_output_tokens=400,
                                                 extra_body={"seed": seed})
            self.assertIsInstance(answer.output_parsed, Person)

    def test_json_object(self):
        answer = self.respond(text={"format": {"type": "json_object"}}, temperature=0,
                              max_output_tokens=1, extra={"stop": ["}"]})
        self.assertTrue(answer.output_text.strip().startswith("{"))

    def test_logprobs(self):
        include = ["message.output_text.logprobs"]
        answer = self.respond(temperature=0, include=include, top_logprobs=2)
        entries = answer.output[0].content[0].logprobs
        chat = self.chat(temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        self.assertEqual([e.logprob for e in entries], [e.logprob for e in chat])
        self.assertEqual([len(e.top_logprobs) for e in entries], [2] * len(entries))
        # Its token is the last one of a message that stops before it.
        word = answer.output_text.split()[3]
        options = {"temperature": 0, "extra": {"stop": [word]}}
        ended = self.respond(include=include, **options).output[0].content[0].logprobs
        chat = self.chat(logprobs=True, **options).choices[0].logprobs.content
        self.assertEqual([e.logprob for e in ended], [e.logprob for e in chat])
        self.assertEqual(self.respond(top_logprobs=2).output[0].content[0].logprobs, [])

    def test_truncation(self):
        long = "word " * 20000
        self.refused("input", "tokens", input=long)
        answer = self.respond(long, truncation="auto", temperature=0)
        self.assertEqual(answer.truncation, "auto")
        self.assertEqual(answer.usage.output_tokens, 12)

    def test_refusals(self):
        for name, value in (("previous_response_id", "resp_1"), ("conversation", "c"),
                            ("background", True), ("prompt", {"id": "p"})):
            self.refused(name, "not supported", **{name: value})
        self.refused("max_output_tokens", "'max_output_tokens'", max_output_tokens=0)
        self.refused("temperature", "", temperature=-1)
        self.refused("truncation", "", truncation="sometimes")
        self.refused("text.format", "'text.format", text={"format": {"type": "xml"}})
        self.refused("text.format", "JSON schema", text={"format": {
            "type": "json_schema", "name": "x", "schema": {"type": "nothing"}}})
        self.refused("tools", "'web_search'", tools=[{"type": "web_search"}])
        self.refused("tools", "name", tools=[{"type": "function", "parameters": {}}])
        self.refused("tool_choice", "'other'", tools=[CLOCK],
                     tool_choice={"type": "function", "name": "other"})
        self.refused("instructions", "", instructions=[1])
        for wrong, param in ((None, "input"), ([], "input"), (3, "input"), (["x"], "input[0]"),
                             ([{"role": "user"}], "input[0]"),
                             ([{"role": "user", "content": "a"},
                               {"type": "item_reference", "id": "x"}], "input[1]"),
                             ([{"role": "user", "content": [{"type": "input_image",
                                                             "image_url": "data:,"}]}], "input[0]"),
                             ([{"type": "function_call", "call_id": "c"}], "input[0]"),
                             ([{"type": "function_call_output", "call_id": "c"}], "input[0]")):
            self.refused(param, input=wrong)
        with self.assertRaises(openai.NotFoundError):
            self.client.responses.create(model="other", input="a")


class ResponseStream(ResponsesCase):
    def events(self, **options):
        events = list(self.respond(stream=True, **options))
        self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
        return events

    def test_text(self):
        options = {"temperature": 0, "max_output_tokens": 20}
        whole = self.respond(**options)
        events = self.events(**options)
        kinds = [e.type.removeprefix("response.") for e in events]
        deltas = kinds.count("output_text.delta")
        self.assertGreater(deltas, 5)
        self.assertEqual(kinds, ["created", "in_progress", "output_item.added", "content_part.added",
                                 *["output_text.delta"] * deltas, "output_text.done",
                                 "content_part.done", "output_item.done",
                                 "completed" if whole.status == "completed" else "incomplete"])
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        self.assertEqual(text, whole.output_text)
        self.assertEqual((events[0].response.status, events[0].response.output), ("in_progress", []))
        last = events[-1].response
        self.assertEqual((last.output_text, last.status), (text, whole.status))
        self.assertEqual(last.usage.output_tokens, whole.usage.output_tokens)
        self.assertEqual({e.item_id for e in events if hasattr(e, "item_id")}, {last.output[0].id})
        self.assertEqual({e.response.id for e in events if hasattr(e, "response")}, {last.id})

    def test_names_of_events(self):
        _, _, data = self.server.request("POST", "/v1/responses", {
            "input": "a", "max_output_tokens": 3, "stream": True})
        for event in data.decode().strip().split("\n\n"):
            name, body = event.split("\n")
            self.assertEqual(name, "event: " + json.loads(body.removeprefix("data: "))["type"])

    def test_call(self):
        options = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200,
                   "extra": {"seed": 3}}
        (whole,) = self.respond(**options).output
        jsonschema.validate(json.loads(whole.arguments), WEATHER["parameters"])
        events = self.events(**options)
        kinds = [e.type.removeprefix("response.") for e in events]
        self.assertEqual(kinds, ["created", "in_progress", "output_item.added",
                                 "function_call_arguments.delta", "function_call_arguments.done",
                                 "output_item.done", "completed"])
        (call,) = events[-1].response.output
        self.assertEqual((call.type, call.name, call.status, call.arguments),
                         ("function_call", "get_weather", "completed", whole.arguments))
        self.assertTrue(call.call_id)

    def test_text_and_calls(self):
        call = '<tool_call>{"name": "get_time", "arguments": {"zone": "%s"}}</tool_call>'
        text = "Let me see.\n" + call % "UTC" + "\n" + call % "CET"
        options = {"tools": [CLOCK], "max_output_tokens": 200,
                   "extra": {"structured_outputs": {"choice": [text]}}}
        for output in (self.respond(**options).output, self.events(**options)[-1].response.output):
            self.assertEqual([item.type for item in output],
                             ["message", "function_call", "function_call"])
            self.assertEqual(output[0].content[0].text.strip(), "Let me see.")
            self.assertEqual([json.loads(c.arguments)["zone"] for c in output[1:]], ["UTC", "CET"])
        one = self.respond(parallel_tool_calls=False, **options).output
        self.assertEqual([item.type for item in one], ["message", "function_call"])
        named = self.respond(tools=[CLOCK, WEATHER], max_output_tokens=100, extra={"seed": 1},
                             tool_choice={"type": "function", "name": "get_time"}).output
        self.assertEqual([item.name for item in named], ["get_time"])

    def test_helper(self):
        """The client's own accumulator, which checks the order and shape of the events."""
        for options in ({"extra_body": {"structured_outputs": {"choice": ["Hello."]}}},
                        {"extra_body": {"seed": 1}, "tools": [CLOCK], "tool_choice": "required"}):
            with self.client.responses.stream(model="default", input="Hello there",
                                              max_output_tokens=100, **options) as stream:
                for _ in stream:
                    pass
                self.assertTrue(stream.get_final_response().output)

    def test_leaving_ends_the_request(self):
        before = self.server.metric("vllm:generation_tokens_total")
        stream = self.respond(max_output_tokens=1900, stream=True, extra={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.assertTrue(self.server.becomes_idle())
        self.assertLess(self.server.metric("vllm:generation_tokens_total") - before, 1900)

    def test_timeout(self):
        last = self.events(max_output_tokens=1900, extra={"ignore_eos": True, "timeout": 0.3})[-1]
        self.assertEqual((last.response.status, last.response.output[0].status),
                         ("cancelled", "incomplete"))


class ResponseReasoning(ResponsesCase):
    """A template that makes the model think; small models never end the thought."""
    flags = ("--reasoning-parser", "qwen3")
    options = {"template": os.path.join(os.path.dirname(__file__), "think.jinja")}

    def test_thought(self):
        options = {"temperature": 0, "extra": {"ignore_eos": True}}
        answer = self.respond(**options)
        (item,) = answer.output
        self.assertEqual((item.type, item.summary, item.status), ("reasoning", [], "incomplete"))
        self.assertEqual(item.content[0].type, "reasoning_text")
        self.assertEqual(item.content[0].text, self.chat(**options).choices[0].message.reasoning)
        self.assertEqual((answer.output_text, answer.usage.output_tokens_details.reasoning_tokens),
                         ("", 12))
        events = list(self.respond(stream=True, **options))
        kinds = [e.type.removeprefix("response.") for e in events]
        deltas = kinds.count("reasoning_text.delta")
        self.assertEqual(kinds, ["created", "in_progress", "output_item.added", "content_part.added",
                                 *["reasoning_text.delta"] * deltas, "reasoning_text.done",
                                 "content_part.done", "output_item.done", "incomplete"])
        self.assertEqual(events[-1].response.output[0].content[0].text, item.content[0].text)

    def test_structure_follows_the_thought(self):
        _, pieces = self.server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False})
        options = {"temperature": 5, "max_output_tokens": 1900, "extra": {
            "seed": 2, "logit_bias": {str(i): 100 for i in pieces["tokens"]}}}
        schema = WEATHER["parameters"]
        answer = self.respond(text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
                              **options)
        self.assertEqual([i.type for i in answer.output], ["reasoning", "message"])
        jsonschema.validate(json.loads(answer.output_text), schema)
        self.assertGreater(answer.usage.output_tokens_details.reasoning_tokens, 4)
        self.assertLess(answer.usage.output_tokens_details.reasoning_tokens,
                        answer.usage.output_tokens)
        called = self.respond(tools=[WEATHER], tool_choice="required", **options)
        self.assertEqual([i.type for i in called.output], ["reasoning", "function_call"])
        jsonschema.validate(json.loads(called.output[1].arguments), schema)
        self.assertEqual(called.output[0].content[0].text, answer.output[0].content[0].text)

    def test_thoughts_go_back_in(self):
        """They are attached to the message or the call that they led to."""
        thought = {"type": "reasoning", "summary": [],
                   "content": [{"type": "reasoning_text", "text": "Be polite."}]}
        first = self.respond([*HELLO, thought, {"role": "assistant", "content": "Hi."}, *HELLO])
        chat = self.chat([*HELLO, {"role": "assistant", "content": "Hi.",
                                   "reasoning_content": "Be polite."}, *HELLO])
        self.assertEqual(first.usage.input_tokens, chat.usage.prompt_tokens)
        without = self.respond([thought, *HELLO, {"role": "assistant", "content": "Hi."}, *HELLO])
        self.assertLess(without.usage.input_tokens, first.usage.input_tokens)


if __name__ == "__main__":
    unittest.main()
