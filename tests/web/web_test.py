"""Drives the web page with headless Chromium against `freshet serve`: asking, answers, tokens, the live view.

usage: web_test.py [Class[.test] ...]    needs FRESHET (the program) and FRESHET_SOURCE_DIR

The other suites (conversations, Markdown, frame) are in the modules that are imported at the end.
"""
import json
import threading
import unittest
import urllib.request
import re
from contextlib import contextmanager

from web_rig import PATIENCE_S, SOURCE, Case, ChatCase, expect


class Thought(Case):
    arguments = ("--reasoning-parser", "qwen3", "--chat-template",
                 str(SOURCE / "tests/server/think.jinja"))

    def test_stands_apart(self):
        page = self.open()
        self.set_tokens(page, 20)
        self.message(page).fill("Tell me about rivers.")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        thought = page.locator(".assistant .thought")
        expect(thought, "thoughts are not folded").not_to_have_attribute("open", "")
        thought.locator("summary").click()
        expect(thought).to_have_attribute("open", "")
        expect(thought.locator("p")).to_have_text(re.compile(".{20}", re.S))
        expect(page.locator(".assistant .body")).to_have_text("")
        expect(page.locator(".user .thought")).to_be_hidden()
        self.message(page).fill("Go on.")
        page.keyboard.press("Enter")
        self.answered(page, 2)
        self.assertEqual([m["content"] for m in self.sent[-1]["messages"]],
                         ["Tell me about rivers.", "Go on."])
        self.assertEqual(self.problems, [])


class Chat(ChatCase):
    def test_streams_and_shows_probabilities(self):
        page = self.open()
        self.set_tokens(page, 60)
        page.get_by_label("Token probabilities").check()
        page.evaluate("""() => { window.lengths = new Set(); new MutationObserver(() => {
            const body = document.querySelector('.assistant .body');
            if (body) lengths.add(body.textContent.length);
        }).observe(document.getElementById('log'), {subtree: true, childList: true, characterData: true}); }""")
        # The answer, of about 25 kB, comes in ten pieces, each when the one before it is shown.
        page.evaluate("""() => { const real = fetch; window.fetch = async (path, options) => {
            const response = await real(path, options);
            if (!String(path).includes('completions')) return response;
            const all = new Uint8Array(await response.arrayBuffer());
            const shown = () => document.querySelector('.assistant .body').textContent;
            let at = 0, before = null;
            return new Response(new ReadableStream({async pull(to) {
                if (at >= all.length) return to.close();
                while (shown() === before) await new Promise((resolve) => setTimeout(resolve, 5));
                before = shown();
                to.enqueue(all.slice(at, at += Math.ceil(all.length / 10)));
            }})); }; }""")
        self.message(page).fill("Tell me about rivers.\nPlease.")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.assertGreater(page.evaluate("lengths.size"), 8, "the answer was shown at once, not as a stream")
        body = self.sent[0]
        self.assertEqual(body["messages"], [{"role": "user", "content": "Tell me about rivers.\nPlease."}])
        self.assertEqual((body["max_tokens"], body["temperature"]), (60, 0))
        expect(page.locator(".numbers")).to_have_text(re.compile(r"60 tokens · [\d.]+ tok/s · first after \d+ ms"))
        tokens = page.locator(".assistant .tok")
        expect(tokens.nth(40)).to_be_attached()
        text = page.locator(".assistant .body").inner_text()
        self.assertEqual("".join("".join(tokens.all_inner_texts()).split()), "".join(text.split()))
        tokens.nth(5).hover()
        expect(page.locator("#popover")).to_be_visible()
        expect(page.locator("#popover")).to_contain_text("%")
        expect(page.locator("#popover .choice").nth(4)).to_be_attached()
        shares = [float(s.strip("<%")) for s in page.locator("#popover .choice > :last-child").all_inner_texts()]
        self.assertEqual(shares, sorted(shares, reverse=True))
        expect(page.locator("#popover .chosen")).to_have_count(1)
        self.keep(page, "chat")
        self.assertEqual(self.problems, [])

    def test_stop_edit_retry(self):
        page = self.open()
        self.set_tokens(page, 1000)
        # Work that even a fast machine does not finish before the key is pressed: many full-length
        # answers, of which the page reads only the beginning until it stops them.
        page.evaluate("""() => { const real = fetch; window.fetch = async (path, options) => {
            const body = options?.body ? JSON.parse(options.body) : {};
            if (body.max_tokens !== 1000) return real(path, options);
            Object.assign(body, {n: 64, ignore_eos: true});
            const response = await real(path, {...options, body: JSON.stringify(body)});
            const reader = response.body.getReader();
            const stopped = new Promise((_, reject) => options.signal.addEventListener("abort",
                () => reject(new DOMException("stopped", "AbortError"))));
            stopped.catch(() => {});
            let chunks = 0;
            const beginning = new ReadableStream({async pull(to) {
                if (++chunks > 30) await stopped;
                const {done, value} = await reader.read();
                if (done) to.close(); else to.enqueue(value);
            }});
            return new Response(beginning, {status: response.status, headers: response.headers}); }; }""")
        before = self.server.metric("vllm:generation_tokens_total")
        self.message(page).fill("Go on and on.")
        page.get_by_role("button", name="Send").click()
        page.wait_for_selector(".streaming .body p", state="attached")
        page.keyboard.press("Escape")
        self.answered(page, 1)
        expect(page.locator(".numbers")).to_have_text(re.compile(r"^[1-9]\d* tokens? .*stopped"))
        self.eventually(page, lambda: self.assertEqual(
            self.server.metric("vllm:num_requests_running"), 0, "the server went on after the stop"))
        self.assertLess(self.server.metric("vllm:generation_tokens_total") - before, 64 * 1000)
        self.set_tokens(page, 8)
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        expect(page.locator(".branches span").last).to_have_text("2/2")
        first = page.locator(".assistant .body").inner_text()
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        expect(page.locator(".branches span").last).to_have_text("3/3")
        self.assertEqual(page.locator(".assistant .body").inner_text(), first, "greedy answers differ")
        self.message(page).fill("And then?")
        page.keyboard.press("Enter")
        self.answered(page, 2)
        page.locator(".user").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit message").fill("Something else.")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        expect(page.locator(".message")).to_have_count(2)
        expect(page.locator(".user .body")).to_have_text("Something else.")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        self.assertEqual(self.problems, [])

    def test_system_prompt_seed_and_keyboard(self):
        page = self.open()
        self.set_tokens(page, 12, "1.5")
        page.get_by_label("Seed").fill("42")
        page.get_by_label("System prompt").fill("Be brief.")
        texts = []
        for _ in range(2):
            self.message(page).focus()
            page.keyboard.type("One")
            page.keyboard.press("Shift+Enter")
            page.keyboard.type("Two")
            page.keyboard.press("Enter")
            self.answered(page, 1)
            texts.append(page.locator(".assistant .body").inner_text())
            page.get_by_role("button", name="New chat").press("Enter")
            expect(page.locator(".message")).to_have_count(0)
        self.assertEqual(texts[0], texts[1], "the seed does not repeat the answer")
        self.assertEqual(self.sent[0]["messages"][0], {"role": "system", "content": "Be brief."})
        self.assertEqual(self.sent[0]["messages"][1]["content"], "One\nTwo")
        self.assertEqual(self.sent[0]["seed"], 42)
        # Every control can be reached by keyboard and has a name.
        page.evaluate("document.activeElement.blur()")
        names = []
        for _ in range(40):
            page.keyboard.press("Tab")
            names.append(page.evaluate("""() => { const e = document.activeElement;
                return e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || e.id; }"""))
        for wanted in ("Skip to the message field", "Conversations", "Settings", "Live", "Search conversations",
                       "Add text files", "Message", "Temperature", "Seed"):
            self.assertIn(wanted, [name.strip() for name in names])
        self.assertEqual(self.problems, [])

    def test_errors_are_shown(self):
        page = self.open()
        page.route("**/v1/chat/completions", lambda route: route.fulfill(
            status=429, headers={"Retry-After": "7"}, content_type="application/json",
            body='{"error": {"message": "queue full"}}'))
        self.message(page).fill("Hello")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("7 s")
        page.unroute("**/v1/chat/completions")
        self.set_tokens(page, 3)
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        expect(page.get_by_role("alert")).to_be_hidden()


class Plain(Case):
    def test_continues_a_text(self):
        page = self.open()
        self.set_tokens(page, 20)
        page.get_by_role("textbox", name="Message").fill("Once upon a time")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.assertEqual(self.sent[0]["prompt"], "Once upon a time")
        first = page.locator(".assistant .body").inner_text()
        self.assertNotEqual(first.strip(), "")
        page.get_by_role("textbox", name="Message").fill(" The end.")
        page.keyboard.press("Enter")
        self.answered(page, 2)
        self.assertTrue(self.sent[1]["prompt"].startswith("Once upon a time"))
        self.assertTrue(self.sent[1]["prompt"].endswith(" The end."))
        self.keep(page, "plain")
        text = "    x = 1\n\n# no heading\n**stars**  <b>"
        page.route("**/v1/completions", lambda route: route.fulfill(
            content_type="text/event-stream", body="data: " + json.dumps({"choices": [{"text": text}]}) + "\n\n"))
        page.get_by_role("textbox", name="Message").fill("More")
        page.keyboard.press("Enter")
        self.answered(page, 3)
        self.eventually(page, lambda: self.assertEqual(
            page.locator(".assistant .body").last.text_content(), text, "not shown as it is"))
        self.assertEqual(self.problems, [])

    def test_files_are_cached_and_confined(self):
        status, headers, html = self.server.get("/")
        self.assertEqual(status, 200)
        self.assertTrue(headers["Content-Type"].startswith("text/html"))
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        self.assertNotIn("unsafe", headers["Content-Security-Policy"])
        self.assertEqual(headers["X-Content-Type-Options"], "nosniff")
        for path in re.findall(r'(?:src|href)="(/web/[^"]+)"', html):
            status, headers, _ = self.server.get(path)
            self.assertEqual(status, 200, path)
            with self.assertRaises(urllib.error.HTTPError) as raised:
                self.server.get(path, **{"If-None-Match": headers["ETag"]})
            self.assertEqual(raised.exception.code, 304)
        for path in ("/web/", "/web/../index.html", "/web/nothing.js"):
            with self.assertRaises(urllib.error.HTTPError):
                self.server.get(path)


class Key(Case):
    arguments = ("--api-key", "secret")

    def test_asks_for_the_key(self):
        page = self.context().new_page()
        page.goto(self.server.url + "/")
        field = page.get_by_label("API key")
        field.wait_for()
        field.fill("wrong")
        page.keyboard.press("Tab")
        page.wait_for_selector("#dot.down")
        field.fill("secret")
        page.keyboard.press("Tab")
        self.connected(page)
        self.set_tokens(page, 3)
        page.locator("#prompt").fill("Hello")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.reload(page)  # the key lasts as long as the tab


class Live(Case):
    def values(self, page):
        return page.locator(".chart canvas").evaluate_all("all => all.map(c => c.getAttribute('aria-label'))")

    @contextmanager
    def busy(self):
        """Clients that send requests in a loop, so that the panel has something to show on any
        machine."""
        done = threading.Event()
        body = json.dumps({"prompt": "The railway", "max_tokens": 200, "ignore_eos": True}).encode()

        def ask():
            while not done.is_set():
                request = urllib.request.Request(self.server.url + "/v1/completions", body,
                                                 {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=PATIENCE_S).read()

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            done.set()
            for client in clients:
                client.join(PATIENCE_S)

    def test_dashboard_moves(self):
        page = self.open()
        expect(page.locator("#live"), "the live view is open on a first visit").to_be_hidden()
        page.get_by_role("button", name="Live").click()
        page.wait_for_function("() => document.querySelector('canvas').getAttribute('aria-label')?.includes('generated')")
        still = page.locator("canvas").first.evaluate("c => c.toDataURL()")
        with self.busy():
            page.wait_for_function("""() => /running [1-9]/.test(
                document.querySelectorAll('canvas')[3].getAttribute('aria-label'))""")
            page.wait_for_function("""() => /generated [1-9]/.test(
                document.querySelector('canvas').getAttribute('aria-label'))""")
            self.assertEqual(len(self.values(page)), 5)
            for latency in (1, 2):
                page.wait_for_function("""at => /mean [\\d.]+ m?s/.test(
                    document.querySelectorAll('canvas')[at].getAttribute('aria-label'))""", arg=latency)
        self.assertNotEqual(page.locator("canvas").first.evaluate("c => c.toDataURL()"), still, "nothing was drawn")
        page.locator("canvas").first.hover(position={"x": 200, "y": 40})
        expect(page.locator("canvas").first).to_have_attribute("aria-label", re.compile("s ago"))
        self.keep(page, "live")
        self.assertEqual(self.problems, [])

    def test_closed_panel_asks_nothing(self):
        page = self.open()
        for _ in range(2):
            page.get_by_role("button", name="Live").click()
        expect(page.locator("#live")).to_be_hidden()
        # Counted where they begin: requests of before may be reported late.
        page.evaluate("""() => { window.asked = []; const real = fetch;
            window.fetch = (path, options) => { asked.push(path); return real(path, options); }; }""")
        page.wait_for_timeout(2500)
        self.assertEqual(page.evaluate("asked"), [])

    def test_fits_a_phone(self):
        page = self.open(390, 844, is_mobile=True, has_touch=True, color_scheme="dark")
        expect(page.locator("#settings")).to_be_hidden()
        self.fits(page, 390)
        self.set_tokens(page, 10)
        page.get_by_role("button", name="Close settings").tap()
        expect(page.locator("#settings")).to_be_hidden()
        page.locator("#prompt").fill("A phone")
        page.get_by_role("button", name="Send").tap()
        self.answered(page, 1)
        self.keep(page, "phone")
        page.locator("#toggle-live").tap()
        page.wait_for_function("() => document.querySelector('canvas').getAttribute('aria-label')")
        self.fits(page, 390)
        self.keep(page, "phone-live")
        self.assertEqual(self.problems, [])


if __name__ == "__main__":
    from conversation_cases import Branches, History, Transfer  # noqa: F401
    from frame_cases import Access, Copying, Frame, Weight  # noqa: F401
    from markdown_cases import Markdown  # noqa: F401
    unittest.main(verbosity=2)
