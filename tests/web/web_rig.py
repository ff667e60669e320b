"""What the tests of the web page share: the browser, the server, and steps on the page.

Playwright, axe and a Markdown parser to compare with come from PyPI into FRESHET_TEST_OUTPUT/venv, once;
Chromium is Debian's. Without them the tests are skipped (exit code 77). Screenshots stay in
FRESHET_TEST_OUTPUT.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request
from pathlib import Path

FRESHET = os.environ.get("FRESHET", "build/release/bin/freshet")
SOURCE = Path(os.environ.get("FRESHET_SOURCE_DIR", "."))
OUTPUT = Path(os.environ.get("FRESHET_TEST_OUTPUT", "build/web_test")).absolute()
MODEL = str(SOURCE / "models/default.gguf")
CHROMIUM = "/usr/bin/chromium"
SKIPPED = 77
# For what must happen soon. The machine may be slow and busy, so only what never happens takes as long.
PATIENCE_S = 180
PACKAGES = ("playwright==1.55.0", "axe-playwright-python==0.1.7", "commonmark==0.9.1")
# A chat template for models without one, to test the chat.
TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}")


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def get_playwright():
    """Playwright's module; installs it and the other packages and starts over if one is missing."""
    try:
        import axe_playwright_python  # noqa: F401
        import commonmark  # noqa: F401
        from playwright import sync_api
        return sync_api
    except ImportError:
        pass
    venv = OUTPUT / "venv"
    python = venv / "bin/python3"
    if os.environ.get("FRESHET_WEB_VENV") or not Path(CHROMIUM).exists():
        skip("playwright cannot be loaded" if Path(CHROMIUM).exists() else f"there is no {CHROMIUM}")
    try:
        if not (venv / "ready-3").exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True, capture_output=True, timeout=120)
            subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True,
                           capture_output=True, timeout=300)
            (venv / "ready-3").touch()
    except (subprocess.SubprocessError, OSError) as error:
        skip(f"playwright cannot be installed ({error})")
    os.environ["FRESHET_WEB_VENV"] = "1"
    os.execv(python, [str(python), *sys.argv])


if not Path(CHROMIUM).exists():
    skip(f"there is no {CHROMIUM}")
sync_api = get_playwright()
# Checks that wait until they hold. What an action leads to may come after the action has returned: taps,
# storage, and all that the server answers.
expect = sync_api.expect
expect.set_options(timeout=PATIENCE_S * 1000)


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
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
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
        cls.start_browser()

    @classmethod
    def start_browser(cls, *arguments):
        playwright = sync_api.sync_playwright().start()
        cls.addClassCleanup(playwright.stop)
        # /dev/shm has 64 MB in containers; pages that outgrow it crash.
        cls.browser = playwright.chromium.launch(
            executable_path=CHROMIUM, timeout=PATIENCE_S * 1000,
            args=["--no-sandbox", "--disable-dev-shm-usage", *arguments])
        cls.addClassCleanup(cls.browser.close)

    def context(self, **options):
        # No transitions: a check of colours might see them half-way.
        context = self.browser.new_context(reduced_motion="reduce", **options)
        self.addCleanup(context.close)
        context.set_default_timeout(PATIENCE_S * 1000)
        return context

    def open(self, width=1440, height=900, url=None, **options):
        url = url or self.server.url
        page = self.context(viewport={"width": width, "height": height}, **options).new_page()
        self.problems = []
        self.sent = []  # bodies of requests
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: self.assertTrue(r.url.startswith(url) or r.url.startswith("blob:"), r.url))
        page.on("request", lambda r: self.sent.append(r.post_data_json) if r.method == "POST" else None)
        page.goto(url + "/")
        self.connected(page)
        return page

    @staticmethod
    def connected(page):
        """Waits until the page knows what is served."""
        page.wait_for_selector("#dot.up")

    def reload(self, page):
        page.reload()
        self.connected(page)

    def eventually(self, page, check):
        """Repeats `check` until it raises nothing."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return check()
            except AssertionError:
                if time.monotonic() > end:
                    raise
            page.wait_for_timeout(20)

    def fits(self, page, width):
        """Nothing is wider than the window."""
        self.eventually(page, lambda: self.assertLessEqual(
            page.evaluate("document.documentElement.scrollWidth"), width))

    def box(self, locator):
        """Where an element is, once it is shown."""
        expect(locator).to_be_visible()
        box = locator.bounding_box()
        self.assertIsNotNone(box, f"{locator} was there and is gone")
        return box

    @staticmethod
    def message(page):
        return page.get_by_role("textbox", name="Message", exact=True)

    @staticmethod
    def open_panel(page, name):
        if page.locator(f"#{name}").is_hidden():
            page.locator(f"#toggle-{name}").click()
        expect(page.locator(f"#{name}")).to_be_visible()

    def set_tokens(self, page, count, temperature="0"):
        self.open_panel(page, "settings")
        page.get_by_label("Max tokens").fill(str(count))
        page.get_by_label("Temperature, exactly").fill(temperature)

    def ask(self, page, text):
        self.message(page).fill(text)
        page.keyboard.press("Enter")

    def answered(self, page, count):
        page.wait_for_function("""n => document.querySelectorAll('.assistant').length === n
            && !document.querySelector('.streaming')""", arg=count)

    @staticmethod
    def kept(page):
        """The conversations that the browser keeps."""
        return page.evaluate("""() => new Promise((resolve, reject) => {
            const opened = indexedDB.open('freshet');
            opened.onupgradeneeded = () => opened.transaction.abort();  // the page has not made it yet
            opened.onerror = () => resolve([]);
            opened.onsuccess = () => {
              const all = opened.result.transaction('conversations').objectStore('conversations').getAll();
              all.onerror = () => reject(all.error);
              all.onsuccess = () => {
                opened.result.close();
                resolve(all.result);
              };
            };
          })""")

    def keeps(self, page, *texts):
        """Waits until the browser keeps complete answers that have these texts; it stores an answer a moment
        after it shows it."""
        def check():
            answers = [n["content"] for c in self.kept(page) for n in c["nodes"]
                       if n["role"] == "assistant" and n["finish"] not in ("", "interrupted")]
            for text in texts:
                self.assertIn(text, answers)
        self.eventually(page, check)

    def throttle(self, page, bytes_per_second=-1):
        """Answers arrive in pieces on any machine; -1 lifts it."""
        if not hasattr(self, "cdp"):
            self.cdp = page.context.new_cdp_session(page)
        self.cdp.send("Network.emulateNetworkConditions", {
            "offline": False, "latency": 0, "downloadThroughput": bytes_per_second, "uploadThroughput": -1})

    @staticmethod
    def script(page, *answers, finish="stop"):
        """The model's answers from now on, in turn; the last one stays. Pieces of a list come one by one."""
        left = list(answers)

        def fulfil(route):
            pieces = left.pop(0) if len(left) > 1 else left[0]
            events = [{"choices": [{"delta": {"content": p} if isinstance(p, str) else p}]}
                      for p in ([pieces] if isinstance(pieces, str) else pieces)]
            events.append({"choices": [{"delta": {}, "finish_reason": finish}],
                           "usage": {"prompt_tokens": 5, "completion_tokens": len(events)}})
            route.fulfill(content_type="text/event-stream",
                          body="".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", fulfil)

    def keep(self, page, name):
        OUTPUT.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=OUTPUT / f"{name}.png")


class ChatCase(Case):
    """With a chat template, which the small model lacks."""
    @classmethod
    def setUpClass(cls):
        with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as file:
            file.write(TEMPLATE)
        cls.addClassCleanup(os.unlink, file.name)
        cls.arguments = ("--chat-template", file.name)
        super().setUpClass()
