"""The page of `explore` in Debian's Chromium, and the verb."""

import re
import signal
import subprocess
import sys
import threading
import urllib.request
from urllib.parse import urlencode

import browser
import pytest
import uvicorn
from helpers import ROOT, run_to_end
from patience import patience
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

import t5x_diffeq as td
from t5x_diffeq.cli.explore import _bind
from t5x_diffeq.inference.explorer.answers import Explorer
from t5x_diffeq.inference.explorer.app import make_app
from t5x_diffeq.inference.explorer.recording import write_recording

TOKEN = "a-token"
NARROW, WIDE = 390, 1280
in_browser = pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not())


@pytest.fixture(scope="module")
def explorer(run_on_lines):
    return Explorer("lines", td.load(run_on_lines))


@pytest.fixture(scope="module")
def origin(explorer):
    """The address of a server."""
    at = _bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app({"lines": explorer}, TOKEN), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
    thread.start()
    yield f"http://127.0.0.1:{at.getsockname()[1]}"
    server.should_exit = True
    thread.join()


class Page(browser.Browser):
    """A browser, and what the tests look at."""

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        found = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)"
        return self.driver.execute_script(found, selector)

    def wait(self, condition):
        return WebDriverWait(self.driver, patience(120)).until(lambda _: condition())

    def wait_for(self, selector, words):
        """Waits until each element that is selected holds the words, and there is one."""
        self.wait(lambda: (got := self.texts(selector)) and all(words in each for each in got))

    def focused(self, what="dataset.token"):
        return self.driver.execute_script(f"return document.activeElement.{what}")

    def press(self, *keys):
        ActionChains(self.driver).send_keys(*keys).perform()

    def errors(self):
        return [line["message"] for line in self.driver.get_log("browser")]


@pytest.fixture(params=[WIDE, NARROW])
def page(request, tmp_path):
    with browser.open_browser() as opened:
        page = Page(opened.driver)
        page.set_width(request.param)
        yield page
        page.save_picture(tmp_path / f"{request.param}.png")


@pytest.mark.slow
@in_browser
def test_type_slide_hover_compare_and_reload(page, origin):
    page.driver.get(f"{origin}/#{urlencode({'token': TOKEN, 'max_tokens': 5})}")
    page.wait_for(".note", "was trained on this grid")
    (text,) = page.all("#text")
    text.clear()
    text.send_keys("line 9 of")
    page.wait(lambda: len(page.all(".tokens span")) == len("line 9 of") + 1)
    (slider,) = page.all(".slider")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert page.texts(".depth output") == ["3"]
    page.wait_for(".note", "says little about the model")
    page.wait_for(".continuation .prompt", "line 9 of")
    page.wait(lambda: len(page.texts(".continuation")[0]) > len("line 9 of"))
    ActionChains(page.driver).move_to_element(page.all(".tokens span")[3]).perform()
    page.wait_for("#token_title", "Token 3: e")
    assert len(page.all(".lens tbody tr")) == 4 and "%" in page.texts(".lens td.piece")[0]
    assert page.all(".lens td.actual") or len(page.all(".lens td.piece")) == 4 * 5
    page.all(".tokens span")[3].click()
    page.all("#compare")[0].click()
    page.wait(lambda: len(page.all(".view")) == 2)
    page.all(".slider")[1].send_keys(Keys.HOME)
    page.wait(lambda: "; B " in page.texts(".summary")[1])
    page.all("#colour [value=difference]")[0].click()
    page.wait_for("#legend", "nats")
    assert page.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    page.wait(
        lambda: (
            page.all("#paths svg")
            and page.all("#sizes svg")
            and len(page.all("#losses circle")) > 8
        )
    )
    address = page.driver.current_url
    page.driver.get("about:blank")
    page.driver.get(address)
    page.wait(lambda: "; B " in "".join(page.texts(".summary")))
    assert page.texts(".depth output") == ["3", "1"]
    assert page.driver.execute_script("return text.value + colour.value") == "line 9 ofdifference"
    page.wait_for("#token_title", "Token 3: e")
    page.all("#colour [value=sensitivity]")[0].click()
    page.wait_for("#legend", "The largest Lyapunov exponent")
    assert page.errors() == []


@pytest.mark.slow
@in_browser
def test_what_is_shown_while_a_text_is_read(page, origin, explorer, monkeypatch):
    """First the tokens, and what is computed; then the reading, and only then the whole run."""
    read, done, analysed = Explorer.read, threading.Event(), []

    def wait(*arguments):
        assert done.wait(patience(120))
        return read(*arguments)

    def validation(*_):
        analysed.append(done.is_set())
        return validate(*_)

    validate = Explorer.validation
    monkeypatch.setattr(Explorer, "read", wait)
    monkeypatch.setattr(Explorer, "validation", validation)
    grids = {"a": "lines,2,euler", "b": "lines,4,euler"}
    page.driver.get(f"{origin}/#{urlencode({'token': TOKEN, 'text': 'line 17', **grids})}")
    page.wait(lambda: len(page.all(".tokens span")) == 2 * (len("line 17") + 1))
    reading = re.compile(r"reading the text in 4 steps of euler … [1-9]\d* s")
    page.wait(lambda: reading.search("".join(page.texts(".view:last-child .progress"))))
    assert page.texts(".summary") == ["", ""]
    page.wait_for("#losses_note", "Computed once the text is read.")
    done.set()
    page.wait_for(".summary", "nats per token")
    page.wait(lambda: page.all("#paths svg") and page.all("#losses circle"))
    assert all(analysed) and page.texts(".progress") == ["", ""]
    assert page.errors() == []


@pytest.mark.slow
@in_browser
def test_an_emptied_and_a_full_text(page, origin, explorer):
    """Nothing is shown of a text that is gone; and where nothing can follow, a line says so."""
    most = explorer.config.max_length
    page.driver.get(f"{origin}/#{urlencode({'token': TOKEN, 'max_tokens': 5, 'text': 'x' * most})}")
    page.wait_for(".room", f"at most {most} tokens: after this text there is room for none.")
    page.wait_for(".summary", "nats per token")
    (text,) = page.all("#text")
    text.send_keys(Keys.BACKSPACE)
    page.wait_for(".room", "there is room for 1.")
    page.wait_for("#token_title", "The next token")
    text.send_keys(Keys.CONTROL, "a")
    text.send_keys(Keys.BACKSPACE)
    page.wait_for("#failure", "the text has no tokens; write something")
    for shown in (".summary", ".tokens", ".continuation", ".room", ".note", "#lenses", "#legend"):
        assert page.texts(shown) == [""], shown
    text.send_keys("line 3")
    page.wait_for(".summary", "nats per token")
    assert not page.all("#failure")[0].is_displayed() and page.texts(".room") == [""]


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("offered", [[2], [1, 2]])
def test_the_marks_of_a_slider_are_inside_the_page(page, origin, explorer, monkeypatch, offered):
    monkeypatch.setattr(explorer, "offered", offered)
    page.driver.get(f"{origin}/#{urlencode({'token': TOKEN, 'max_tokens': 0, 'text': 'line 3'})}")
    page.wait_for(".marks span", "2 trained")
    inside = """
    const box = (selector) => document.querySelector(selector).getBoundingClientRect();
    const mark = box(".marks span"), room = box(".marks");
    return mark.left >= room.left && mark.right <= room.right;
    """
    assert page.run(inside)


@pytest.mark.slow
@in_browser
def test_keyboard_alone(page, origin):
    page.driver.get(f"{origin}/#{urlencode({'token': TOKEN, 'max_tokens': 5, 'text': 'line 9'})}")
    page.wait_for(".summary", "nats per token")
    page.wait_for("#token_title", "The next token")
    reached = set()
    while page.focused() is None:
        page.press(Keys.TAB)
        reached.add(page.focused("id") or page.focused("className"))
    assert {"text", "colour", "compare", "run", "scheme", "slider"} <= reached
    page.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    page.wait_for("#token_title", "Token 4")
    page.press(Keys.HOME)
    page.wait_for("#token_title", "Token 0: l")
    page.press(Keys.END)
    page.wait_for("#token_title", "The next token")
    assert page.driver.execute_script("return document.activeElement.getAttribute('aria-label')")
    while page.focused("className") != "slider":
        page.press(Keys.SHIFT + Keys.TAB)
    page.press(Keys.END)
    page.wait_for(".note", "says little about the model")
    assert page.texts(".depth output") == ["12"]
    assert page.errors() == []


@pytest.mark.slow
@in_browser
def test_what_can_not_be_read_is_said(page, origin):
    page.driver.get(f"{origin}/#token=wrong")
    page.wait_for("#failure", "its terminal prints an address")
    page.driver.get("about:blank")
    page.driver.get(f"{origin}/#{urlencode({'token': TOKEN, 'text': 'x' * 500})}")
    page.wait_for(".note", "has 500 tokens, and the model takes 160: the last 120 are read here")
    page.driver.get("about:blank")
    page.driver.get(f"{origin}/#{urlencode({'token': TOKEN, 'text': ''})}")
    page.wait_for("#failure", "the text has no tokens; write something")


@pytest.mark.slow
@in_browser
def test_a_page_without_a_server(page, explorer, tmp_path):
    file = tmp_path / "explore.html"
    write_recording(file, explorer, 'if </script> "é')
    page.driver.get(file.as_uri())
    page.wait_for(".note", "was trained on this grid")
    page.all(".slider")[0].send_keys(Keys.END)
    page.wait_for(".note", "says little about the model")
    page.wait(lambda: len(page.texts(".continuation")[0]) > len('if </script> "é'))
    page.wait(lambda: page.all("#paths svg") and len(page.all("#losses circle")) > 8)
    assert not page.all("#failure")[0].is_displayed() and page.errors() == []


@pytest.mark.slow
def test_the_verb(run_on_lines):
    """It prints its address, answers here alone, and ends well at Ctrl-C."""
    command = [sys.executable, "-m", "t5x_diffeq.explore", "--port=0"]
    process = subprocess.Popen(
        [*command, f"--workdir={run_on_lines}", f"--workdir={run_on_lines}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        address, _, token = process.stdout.readline().strip().partition("/#token=")
        assert address.startswith("http://127.0.0.1:")
        headers = {"authorization": f"Bearer {token}"}
        asked = urllib.request.Request(f"{address}/api/runs", headers=headers)
        with urllib.request.urlopen(asked, timeout=patience(60)) as answer:
            said = answer.read().decode()
        assert '"run"' in said and '"run-2"' in said and str(run_on_lines) not in said
        port = address.rpartition(":")[2]
        taken = run_to_end([*command[:-1], f"--port={port}", f"--workdir={run_on_lines}"])
        assert taken.returncode == 2 and f"--port={port} can't be used" in taken.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=patience(60)) == 0
    finally:
        process.kill()
