"""Drives the web page with headless Chromium against `freshet serve`.

usage: web_test.py [Class[.test] ...]    needs FRESHET (the program) and FRESHET_SOURCE_DIR

Playwright comes from PyPI into FRESHET_TEST_OUTPUT/venv, once; Chromium is Debian's. Without either the
tests are skipped (exit code 77). Screenshots stay in FRESHET_TEST_OUTPUT.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.request
from contextlib import contextmanager
from pathlib import Path

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
SOURCE = Path(os.environ.get("FRESHET_SOURCE_DIR", "."))
OUTPUT = Path(os.environ.get("FRESHET_TEST_OUTPUT", "build/web_test")).absolute()
MODEL = str(SOURCE / "models/default.gguf")
CHROMIUM = "/usr/bin/chromium"
SKIPPED = 77
# A chat template for models without one, to test the chat.
TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}")


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def get_playwright():
    """Imports playwright; installs it and starts over if it is missing."""
    try:
        from playwright.sync_api import sync_playwright
        return sync_playwright
    except ImportError:
        pass
    venv = OUTPUT / "venv"
    python = venv / "bin/python3"
    if os.environ.get("FRESHET_WEB_VENV") or not Path(CHROMIUM).exists():
        skip("playwright cannot be loaded" if Path(CHROMIUM).exists() else f"there is no {CHROMIUM}")
    try:
        if not (venv / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, capture_output=True, timeout=120)
            subprocess.run([python, "-m", "pip", "install", "-q", "playwright==1.55.0"], check=True,
                           capture_output=True, timeout=300)
            (venv / "ready").touch()
    except (subprocess.SubprocessError, OSError) as error:
        skip(f"playwright cannot be installed ({error})")
    os.environ["FRESHET_WEB_VENV"] = "1"
    os.execv(python, [str(python), *sys.argv])


class Server:
    """`freshet serve` of the small model that comes with the sources, on a free port."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([FRESHET, "serve", MODEL, "--port", "0", "--disable-access-log", *arguments],
                                        stderr=subprocess.PIPE, text=True)
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            address = re.search(r"serving .* at (http://\S+)", line)
            if address:
                self.url = address[1]
                return
        self.close()
        raise AssertionError("the server did not start: " + "".join(lines))

    def get(self, path, **headers):
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()

    def metric(self, name):
        _, _, text = self.get("/metrics")
        return float(re.search(rf"^{name}\S* (\S+)$", text, re.M)[1])

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        said = self.process.stderr.read()
        self.process.stderr.close()
        if self.process.returncode == 99:  # sanitizer exit code, set in CMakePresets.json
            raise AssertionError(said)


class Case(unittest.TestCase):
    arguments = ()

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.arguments)
        cls.addClassCleanup(cls.server.close)
        playwright = sync_playwright().start()
        cls.addClassCleanup(playwright.stop)
        cls.browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        cls.addClassCleanup(cls.browser.close)

    def open(self, width=1440, height=900, **options):
        context = self.browser.new_context(viewport={"width": width, "height": height}, **options)
        self.addCleanup(context.close)
        page = context.new_page()
        page.set_default_timeout(60_000)
        self.problems = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: self.assertTrue(r.url.startswith(self.server.url), r.url))
        page.goto(self.server.url + "/")
        page.wait_for_selector("#dot.up")
        return page

    @staticmethod
    def message(page):
        return page.get_by_role("textbox", name="Message", exact=True)

    @staticmethod
    def set_tokens(page, count, temperature="0"):
        page.get_by_label("Max tokens").fill(str(count))
        page.get_by_label("Temperature, exactly").fill(temperature)

    def answered(self, page, count):
        page.wait_for_function("n => document.querySelectorAll('.assistant:not(.streaming) .numbers')"
                               ".length === n", arg=count)

    def keep(self, page, name):
        OUTPUT.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=OUTPUT / f"{name}.png")


class Thought(Case):
    arguments = ("--reasoning-parser", "qwen3", "--chat-template",
                 str(SOURCE / "tests/server/think.jinja"))

    def test_stands_apart(self):
        page = self.open()
        self.set_tokens(page, 20)
        sent = []
        page.on("request", lambda r: sent.append(r) if r.method == "POST" else None)
        self.message(page).fill("Tell me about rivers.")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        thought = page.locator(".assistant .thought")
        self.assertGreater(len(thought.inner_text()), 20)
        self.assertEqual(page.locator(".assistant .body").inner_text().strip(), "")
        self.assertTrue(page.locator(".user .thought").is_hidden())
        thought.locator("summary").click()
        self.assertFalse(thought.evaluate("e => e.open"))
        self.message(page).fill("Go on.")
        page.keyboard.press("Enter")
        self.answered(page, 2)
        self.assertEqual([m["content"] for m in sent[-1].post_data_json["messages"]],
                         ["Tell me about rivers.", "Go on."])
        self.assertEqual(self.problems, [])


class Chat(Case):
    @classmethod
    def setUpClass(cls):
        with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
            file.write(TEMPLATE)
        cls.addClassCleanup(os.unlink, file.name)
        cls.arguments = ("--chat-template", file.name)
        super().setUpClass()

    def test_streams_and_shows_probabilities(self):
        page = self.open()
        self.set_tokens(page, 60)
        sent = []
        page.on("request", lambda r: sent.append(r) if r.method == "POST" else None)
        page.evaluate("""() => { window.lengths = new Set(); new MutationObserver(() => {
            const body = document.querySelector('.assistant .body');
            if (body) lengths.add(body.textContent.length);
        }).observe(document.getElementById('log'), {subtree: true, childList: true, characterData: true}); }""")
        # About 25 kB of answer, slow enough to arrive in pieces on any machine.
        page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", {
            "offline": False, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1})
        self.message(page).fill("Tell me about rivers.\nPlease.")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.assertGreater(page.evaluate("lengths.size"), 8, "the answer came at once, not as a stream")
        body = sent[0].post_data_json
        self.assertEqual(body["messages"], [{"role": "user", "content": "Tell me about rivers.\nPlease."}])
        self.assertEqual((body["max_tokens"], body["temperature"]), (60, 0))
        self.assertRegex(page.locator(".numbers").inner_text(), r"60 tokens · [\d.]+ tok/s · first after \d+ ms")
        tokens = page.locator(".assistant .tok")
        self.assertGreater(tokens.count(), 40)
        text = page.locator(".assistant .body").inner_text()
        self.assertEqual("".join(tokens.all_inner_texts()).split(), text.split())
        tokens.nth(5).hover()
        card = page.locator("#popover")
        self.assertRegex(card.inner_text(), r"%")
        self.assertGreaterEqual(page.locator("#popover .choice").count(), 5)
        shares = [float(s.strip("<%")) for s in page.locator("#popover .choice > :last-child").all_inner_texts()]
        self.assertEqual(shares, sorted(shares, reverse=True))
        self.assertEqual(page.locator("#popover .chosen").count(), 1)
        self.keep(page, "chat")
        self.assertEqual(self.problems, [])

    def test_stop_edit_retry(self):
        page = self.open()
        self.set_tokens(page, 1000)
        # Work that even a fast machine does not finish before the key is pressed: many full-length
        # answers.
        page.evaluate("""() => { const real = fetch; window.fetch = (path, options) => {
            const body = options?.body ? JSON.parse(options.body) : {};
            if (body.max_tokens === 1000) Object.assign(body, {n: 64, ignore_eos: true});
            return real(path, options?.body ? {...options, body: JSON.stringify(body)} : options); }; }""")
        before = self.server.metric("vllm:generation_tokens_total")
        self.message(page).fill("Go on and on.")
        page.get_by_role("button", name="Send").click()
        page.wait_for_selector(".streaming .tok", state="attached")
        page.keyboard.press("Escape")
        self.answered(page, 1)
        self.assertIn("stopped", page.locator(".numbers").inner_text())
        for _ in range(50):
            if self.server.metric("vllm:num_requests_running") == 0:
                break
            page.wait_for_timeout(100)
        self.assertEqual(self.server.metric("vllm:num_requests_running"), 0, "the server went on after the stop")
        self.assertLess(self.server.metric("vllm:generation_tokens_total") - before, 64 * 1000)
        self.set_tokens(page, 8)
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        first = page.locator(".assistant .body").inner_text()
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        self.assertEqual(page.locator(".assistant .body").inner_text(), first, "greedy answers differ")
        self.message(page).fill("And then?")
        page.keyboard.press("Enter")
        self.answered(page, 2)
        page.locator(".user").first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit message").fill("Something else.")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.assertEqual(page.locator(".message").count(), 2)
        self.assertEqual(page.locator(".user .body").inner_text(), "Something else.")
        page.get_by_role("button", name="New chat").click()
        self.assertEqual(page.locator(".message").count(), 0)
        self.assertEqual(self.problems, [])

    def test_system_prompt_seed_and_keyboard(self):
        page = self.open()
        self.set_tokens(page, 12, "1.5")
        page.get_by_label("Seed").fill("42")
        page.get_by_label("System prompt").fill("Be brief.")
        sent = []
        page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
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
        self.assertEqual(texts[0], texts[1], "the seed does not repeat the answer")
        self.assertEqual(sent[0]["messages"][0], {"role": "system", "content": "Be brief."})
        self.assertEqual(sent[0]["messages"][1]["content"], "One\nTwo")
        self.assertEqual(sent[0]["seed"], 42)
        # Every control can be reached by keyboard and has a name.
        page.evaluate("document.activeElement.blur()")
        names = []
        for _ in range(30):
            page.keyboard.press("Tab")
            names.append(page.evaluate("""() => { const e = document.activeElement;
                return e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || e.id; }"""))
        for wanted in ("Skip to the message field", "Settings", "Live", "Temperature", "Seed", "Message"):
            self.assertIn(wanted, [name.strip() for name in names])
        self.assertEqual(self.problems, [])

    def test_text_stays_text(self):
        page = self.open()
        self.set_tokens(page, 1)
        self.message(page).fill("<img src=x onerror=alert(1)> `code`")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.assertEqual(page.locator(".user .body").inner_text(), "<img src=x onerror=alert(1)> `code`")
        # Model output, sent to the page as the server would.
        page.route("**/v1/chat/completions", lambda route: route.fulfill(
            content_type="text/event-stream", body="".join(
                f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n"
                for piece in ("<script>alert(1)</script> a ``b`` `c<b>`\n\n``", "`py\nx = '<i>'\n", "```\nend"))))
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        self.assertEqual(page.locator(".assistant .body script, .assistant .body b, .assistant .body i").count(), 0)
        self.assertEqual(page.locator(".assistant p code").all_inner_texts(), ["b", "c<b>"])
        self.assertEqual(page.locator(".assistant pre").inner_text(), "x = '<i>'")
        self.assertEqual(page.locator(".assistant .body p").last.inner_text(), "end")

    def test_errors_are_shown(self):
        page = self.open()
        page.route("**/v1/chat/completions", lambda route: route.fulfill(
            status=429, headers={"Retry-After": "7"}, content_type="application/json",
            body='{"error": {"message": "queue full"}}'))
        self.message(page).fill("Hello")
        page.keyboard.press("Enter")
        self.assertIn("7 s", page.get_by_role("alert").inner_text())
        page.unroute("**/v1/chat/completions")
        self.set_tokens(page, 3)
        page.get_by_role("button", name="Retry").click()
        self.answered(page, 1)
        self.assertFalse(page.get_by_role("alert").is_visible())


class Plain(Case):
    def test_continues_a_text(self):
        page = self.open()
        self.set_tokens(page, 20)
        sent = []
        page.on("request", lambda r: sent.append(r) if r.method == "POST" else None)
        page.get_by_role("textbox", name="Message").fill("Once upon a time")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        self.assertTrue(sent[0].url.endswith("/v1/completions"))
        self.assertEqual(sent[0].post_data_json["prompt"], "Once upon a time")
        first = page.locator(".assistant .body").inner_text()
        self.assertNotEqual(first.strip(), "")
        page.get_by_role("textbox", name="Message").fill(" The end.")
        page.keyboard.press("Enter")
        self.answered(page, 2)
        self.assertTrue(sent[1].post_data_json["prompt"].startswith("Once upon a time"))
        self.assertTrue(sent[1].post_data_json["prompt"].endswith(" The end."))
        self.assertGreater(page.locator(".assistant .tok").count(), 20)
        self.keep(page, "plain")
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
        page = self.browser.new_page()
        self.addCleanup(page.close)
        page.goto(self.server.url + "/")
        field = page.get_by_label("API key")
        field.wait_for()
        field.fill("wrong")
        page.keyboard.press("Tab")
        page.wait_for_selector("#dot.down")
        field.fill("secret")
        page.keyboard.press("Tab")
        page.wait_for_selector("#dot.up")
        self.set_tokens(page, 3)
        page.locator("#prompt").fill("Hello")
        page.keyboard.press("Enter")
        self.answered(page, 1)
        page.reload()  # the key lasts as long as the tab
        page.wait_for_selector("#dot.up")


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
                urllib.request.urlopen(request, timeout=60).read()

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            done.set()
            for client in clients:
                client.join(60)

    def test_dashboard_moves(self):
        page = self.open()
        page.wait_for_function("document.querySelector('canvas').getAttribute('aria-label')?.includes('generated')")
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
        self.assertIn("s ago", self.values(page)[0])
        self.keep(page, "live")
        self.assertEqual(self.problems, [])

    def test_closed_panel_asks_nothing(self):
        page = self.open()
        page.get_by_role("button", name="Live").click()
        page.wait_for_timeout(500)
        asked = []
        page.on("request", lambda r: asked.append(r.url))
        page.wait_for_timeout(2500)
        self.assertEqual(asked, [])

    def test_fits_a_phone(self):
        page = self.open(390, 844, is_mobile=True, has_touch=True, color_scheme="dark")
        self.assertFalse(page.locator("#settings").is_visible())
        self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), 390)
        page.locator("#toggle-settings").tap()
        self.set_tokens(page, 10)
        page.get_by_role("button", name="Close settings").tap()
        page.locator("#prompt").fill("A phone")
        page.get_by_role("button", name="Send").tap()
        self.answered(page, 1)
        self.keep(page, "phone")
        page.locator("#toggle-live").tap()
        page.wait_for_function("() => document.querySelector('canvas').getAttribute('aria-label')")
        self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), 390)
        self.keep(page, "phone-live")
        self.assertEqual(self.problems, [])


if __name__ == "__main__":
    if not Path(CHROMIUM).exists():
        skip(f"there is no {CHROMIUM}")
    sync_playwright = get_playwright()
    unittest.main(verbosity=2)
