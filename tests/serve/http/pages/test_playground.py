"""The playground in a browser: chat, shading, slider, race, and what goes wrong."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from web.chromium import needs_chromium, serious_faults
from web.live_server import LiveServer

pytestmark = needs_chromium
_TAU = 0.1  # some proposals of the random model reach it, and some do not
_MAX_SHADE = 5
JSON = {"Content-Type": "application/json"}


def ready(page: Page) -> None:
    page.locator("#facts").filter(has_text="context of").wait_for()
    page.locator("#examples .hint").wait_for()


def set_tau(page: Page, tau: float) -> None:
    page.locator("#tau").evaluate(
        "(slider, tau) => { slider.value = tau; slider.dispatchEvent(new Event('input')) }", tau
    )


def ask(page: Page, text: str, max_tokens: int = 24) -> list[dict]:
    """Send a prompt, and return the events of its stream once the answer is whole."""
    page.locator("#max-tokens").evaluate("(box, most) => { box.value = most }", max_tokens)
    page.fill("#prompt", text)
    with page.expect_response("**/chat/completions") as found:
        page.keyboard.press("Enter")
    until_idle(page)
    return events_of(found.value.text())


def until_idle(page: Page) -> None:
    page.locator("body:not([data-running])").wait_for()


def events_of(stream: str) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(events: list[dict]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def visible(text: str) -> str:
    """Return text as the page shows it, with pictures of control characters."""
    return re.sub(r"[\x00-\x08\x0b-\x1f]", lambda each: chr(0x2400 + ord(each[0])), text)


def shown(page: Page, within: str = ".output") -> list[tuple[str, int, int]]:
    """Return text, number of tokens and shade of each pass that is shown."""
    return page.locator(f"{within} .pass").evaluate_all(
        "spans => spans.map(each => [each.textContent, Number(each.dataset.tokens), "
        "Number(each.dataset.shade)])"
    )


def test_an_answer_is_shaded_by_what_the_server_tells(open_page, server):
    page, watch = open_page(server)
    ready(page)
    set_tau(page, _TAU)
    events = ask(page, "What is 3 plus 4?")
    told = [event["mars"]["tokens"] for event in events]
    assert set(told) > {1}
    passes = shown(page)
    assert [tokens for _, tokens, _ in passes] == told
    assert [shade for *_, shade in passes] == [min(max(each, 1), _MAX_SHADE) for each in told]
    assert "".join(text for text, *_ in passes) == visible(text_of(events))
    meta = page.locator("#messages .meta").last.inner_text()
    assert f"{sum(told)} tokens" in meta
    assert f"{len(told)} passes" in meta

    index, details = next(
        (index, event["mars"]["pass"])
        for index, event in enumerate(events)
        if event["mars"]["pass"]["rejected"] and event["choices"][0]["delta"]["content"]
    )
    page.locator(".output .pass").nth(index).hover()
    inspector = page.locator("#inspector")
    assert f"Pass {index + 1}" in inspector.inner_text()
    assert "τ = 0.1" in inspector.inner_text()
    proposals = [*details["accepted"], *details["rejected"]]
    found = inspector.locator(".proposal .number").all_inner_texts()
    assert [float(each) for each in found] == pytest.approx(
        [each["confidence"] for each in proposals], abs=0.001
    )
    assert inspector.locator(".rejected").count() == len(details["rejected"])
    assert serious_faults(page) == []
    assert (watch.problems, watch.foreign) == ([], [])


def test_tokens_come_as_they_are_made_and_an_answer_can_be_stopped(open_page, server, backend):
    page, _ = open_page(server)
    ready(page)
    backend.gate.clear()
    try:
        page.fill("#prompt", "What is 3 plus 4?")
        page.keyboard.press("Enter")
        expect(page.locator(".output .pass")).to_have_count(2)  # the third waits at the gate
        assert "2 passes" in page.locator("#messages .meta").last.inner_text()
        page.keyboard.press("Escape")
        until_idle(page)
        assert "Stopped" in page.locator("#messages .meta").last.inner_text()
    finally:
        backend.gate.set()
    events = ask(page, "And 4 plus 5?", 8)  # the conversation goes on
    assert page.locator(".message.assistant").count() == 2
    assert len(events) == page.locator("#messages .output").last.locator(".pass").count()


def test_the_slider_stands_on_the_frontier_and_acts_on_the_next_message(open_page, server):
    page, _ = open_page(server)
    ready(page)
    expected = page.locator("#expected")
    set_tau(page, 0.9)
    assert "Dead zone" in expected.inner_text()
    assert "1 point (−1 to 3)" in expected.inner_text()
    assert "never faster" in expected.inner_text()
    page.focus("#tau")
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    assert page.locator("#tau-value").inner_text() == "0.50"
    text = expected.inner_text()
    assert "10 points (8 to 12)" in text
    # 4 tokens in 3.5 ms, and mode exact gives 2 in 2.5 ms
    assert "1,143 tokens/s, 1.43× exact" in text
    assert "Dead zone" not in text
    page.keyboard.press("ArrowLeft")
    assert "Between measured τ" in expected.inner_text()
    set_tau(page, 0.05)
    assert "nothing is known" in expected.inner_text()
    assert page.locator("#frontier svg").get_attribute("aria-label").count("loses") == 3

    with page.expect_request("**/chat/completions") as sent:
        ask(page, "What?", 4)
    body = sent.value.post_data_json
    assert (body["mode"], body["confidence_threshold"]) == ("threshold", 0.05)
    page.check("input[name=mode][value=exact]", force=True)
    assert "nothing" in expected.inner_text()
    with page.expect_request("**/chat/completions") as sent:
        ask(page, "And?", 4)
    body = sent.value.post_data_json
    assert (body["mode"], "confidence_threshold" in body) == ("exact", False)
    assert [each["role"] for each in body["messages"]] == ["user", "assistant", "user"]


def test_a_race_marks_the_first_difference_from_ar(open_page, server):
    page, watch = open_page(server)
    ready(page)
    page.check("input[name=view][value=race]", force=True)
    page.locator(".lane input").last.fill(str(_TAU))
    page.locator("#max-tokens").evaluate("box => { box.value = 24 }")
    texts = {}

    def keep(response):
        if response.url.endswith("/completions"):
            body = response.request.post_data_json
            texts[body["mode"]] = response

    page.on("response", keep)
    page.locator(".example").first.click()
    until_idle(page)
    texts = {mode: text_of(events_of(response.text())) for mode, response in texts.items()}
    assert texts.keys() == {"ar", "exact", "threshold"}
    assert texts["exact"] == texts["ar"] != texts["threshold"]
    assert sorted(page.locator(".badge").all_inner_texts()) == ["1st", "2nd", "3rd"]
    lanes = page.locator(".lane")
    assert lanes.nth(1).locator(".divergence").count() == 0
    assert "The same text as ar" in lanes.nth(1).locator(".verdict").inner_text()
    offset = next(
        place
        for place, (own, other) in enumerate(zip(texts["threshold"], texts["ar"], strict=False))
        if own != other
    )
    before = lanes.nth(2).evaluate(
        """lane => {
            const range = document.createRange();
            range.setStart(lane.querySelector(".output .text"), 0);
            range.setEndBefore(lane.querySelector(".divergence"));
            return range.toString();
        }"""
    )
    assert before == visible(texts["threshold"][:offset])
    assert f"character {offset + 1} on" in lanes.nth(2).locator(".verdict").inner_text()
    assert serious_faults(page) == []
    assert (watch.problems, watch.foreign) == ([], [])


def test_everything_works_by_keyboard(open_page, server):
    page, _ = open_page(server)
    ready(page)
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.keyboard.type("What is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("3 plus 4?")
    page.keyboard.press("Enter")
    until_idle(page)
    assert page.locator(".said").inner_text() == "What is\n3 plus 4?"
    for _ in range(5):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.className") == "output":
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "Pass 2" in page.locator("#inspector").inner_text()
    assert "Pass 2" in page.locator("[role=status][aria-live]").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#inspector").is_hidden()


def test_it_fits_a_phone_and_keeps_the_chosen_colours(open_page, server):
    page, _ = open_page(server, viewport={"width": 360, "height": 740})
    ready(page)
    ask(page, "word " * 30, 24)
    width = "document.scrollingElement.scrollWidth"
    assert page.evaluate(width) == 360
    page.check("input[name=view][value=race]", force=True)
    assert page.evaluate(width) == 360
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme-button")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    ready(page)
    assert serious_faults(page) == []


def test_markup_in_an_output_is_shown_and_not_run(open_page, server):
    page, watch = open_page(server)
    ready(page)
    markup = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    page.evaluate(
        "schema => { document.querySelector('#schema').value = schema }",
        json.dumps({"const": markup}),
    )
    ask(page, "What?", 120)
    assert json.loads(page.locator(".output .text").inner_text()) == markup
    assert page.locator(".output img, .output script").count() == 0
    assert page.title() == "Playground · marsray"
    assert watch.problems == []


def test_a_key_is_asked_for_kept_in_the_tab_and_sent_in_the_header(open_page, keyed_server):
    page, watch = open_page(keyed_server)
    dialog = page.locator("#key-dialog")
    dialog.wait_for()
    assert "needs a key" in dialog.inner_text()
    assert serious_faults(page) == []
    page.fill("#key-input", "ключ")  # no header can hold it
    page.keyboard.press("Enter")
    assert page.locator("#key-input:invalid").count() == 1
    page.fill("#key-input", " a-wrong-key ")
    page.keyboard.press("Enter")
    page.get_by_text("does not know this key").first.wait_for()
    page.fill("#key-input", "key-of-the-tests")
    with page.expect_request("**/v1/models") as sent:
        page.keyboard.press("Enter")
    assert sent.value.headers["authorization"] == "Bearer key-of-the-tests"
    ready(page)
    assert dialog.is_hidden()
    assert page.evaluate("Object.values(localStorage).length + document.cookie.length") == 0
    page.reload()
    ready(page)  # the tab has kept it
    other = page.context.new_page()
    other.goto(keyed_server.address)
    other.locator("#key-dialog").wait_for()
    assert watch.foreign == []


def test_a_server_that_goes_away_is_told_and_found_again(open_page, server):
    page, _ = open_page(server)
    ready(page)
    server.stop()
    try:
        page.fill("#prompt", "What is 3 plus 4?")
        page.keyboard.press("Enter")
        page.get_by_text("The server does not answer").first.wait_for()
        page.locator("#connection[data-state=away]").wait_for()
        assert page.input_value("#prompt") == "What is 3 plus 4?"
        assert page.locator(".message").count() == 0
    finally:
        server.start()
    page.locator("#connection[data-state=ready]").wait_for()
    page.locator("#notice").wait_for(state="hidden")
    page.locator("#prompt").press("Enter")
    page.locator(".output .pass").first.wait_for(state="attached")
    until_idle(page)


def test_tools_are_called_and_their_results_sent(open_page, server):
    page, watch = open_page(server)
    ready(page)
    page.select_option("#model", "tools")
    page.get_by_text("Run marsray calibrate on its checkpoint").wait_for()  # no frontier
    parameters = {"type": "object", "properties": {"a": {"const": "<b>"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    page.locator("summary", has_text="Tools").click()
    page.fill("#tools", json.dumps([tool]))
    page.check("#tools-required")
    ask(page, "7?", 90)
    assert json.loads(page.locator(".output .call").inner_text()) == {"a": "<b>"}
    assert page.locator(".output").get_by_text("Calls add").is_visible()
    page.locator(".results textarea").fill("8")
    with page.expect_request("**/chat/completions") as sent:
        page.locator(".results button").click()
    messages = sent.value.post_data_json["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    until_idle(page)
    assert page.locator("#messages .output").count() == 2
    page.evaluate("document.querySelector('#max-tokens').value = 1")
    page.click("#show-request")
    paths = page.locator("#request-api option").evaluate_all("all => all.map(each => each.value)")
    lines = [json.loads(request_text(page, path, "line")) for path in paths]
    counts = [num_prompt_tokens(server, line) for line in lines]
    assert counts == [counts[0]] * 3 != [0] * 3
    assert (watch.problems, watch.foreign) == ([], [])


def test_a_plain_model_says_what_it_lacks(open_page, server):
    page, watch = open_page(server)
    ready(page)
    page.select_option("#model", "plain")
    page.locator("#facts").filter(has_text="one token a pass").wait_for()
    assert page.locator("input[name=mode]:disabled").count() == 2
    assert "mars.json" in page.locator("#mode-hint").inner_text()
    assert "mars.json" in page.locator("#expected").inner_text()
    assert "marsray calibrate" in page.locator("#examples").inner_text()
    ask(page, "What?", 6)
    assert {tokens for _, tokens, _ in shown(page)} <= {0, 1}
    page.select_option("#model", "tools")
    page.locator("input[name=mode][value=threshold]:checked").wait_for(state="attached")
    assert watch.problems == []


def test_what_cannot_be_sent_is_said_in_words_and_kept(open_page, server):
    page, _ = open_page(server)
    ready(page)
    long = "a word " * 14_286
    page.fill("#prompt", long[:100_000])
    assert "100,000 characters" in page.locator("#prompt-hint").inner_text()
    page.keyboard.press("Enter")
    notice = page.locator("#notice:not([hidden])")
    notice.filter(has_text="tokens").wait_for()
    assert len(page.input_value("#prompt")) == 100_000
    assert page.locator(".message").count() == 0
    page.fill("#prompt", "What?")
    page.evaluate("document.querySelector('#tools').value = '{'")
    page.keyboard.press("Enter")
    assert "no JSON" in page.locator("#tools-problem").inner_text()
    page.evaluate("document.querySelector('#tools').value = '{}'")
    page.click("#send")
    assert "JSON list" in page.locator("#tools-problem").inner_text()
    assert page.locator(".message").count() == 0


def posted(server: LiveServer, path: str, body: str) -> str:
    response = httpx.post(f"{server.address}{path}", content=body, headers=JSON, timeout=60)
    assert response.status_code == 200, response.text
    return response.text


def num_prompt_tokens(server: LiveServer, line: dict) -> int:
    usage = json.loads(posted(server, line["url"], json.dumps(line["body"])))["usage"]
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
    return sum(usage.get(name, 0) for name in names)


def request_text(page: Page, api: str, form: str) -> str:
    """Return what the open dialog shows for an API, as curl, python or line."""
    page.select_option("#request-api", api)
    page.select_option("#request-form", form)
    return page.locator("#request-text").inner_text()


def printed_by(program: str) -> str:
    printed = StringIO()
    with redirect_stdout(printed):
        exec(program, {})  # noqa: S102 - the page's own
    return printed.getvalue()


def test_the_shown_requests_do_in_every_api_what_the_page_does(open_page, server):
    page, _ = open_page(server, permissions=["clipboard-read", "clipboard-write"])
    ready(page)
    page.evaluate("document.querySelector('#system').value = \"Don't guess\\u2028é\"")
    page.evaluate("document.querySelector('#seed').value = 7")
    events = ask(page, "What's 3 plus 4?", 12)
    page.fill("#prompt", "What's 3 plus 4?")
    page.click("#clear")
    page.click("#show-request")
    for api in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert printed_by(request_text(page, api, "python")) == text_of(events)
        command = shlex.split(request_text(page, api, "curl").replace("\\\n", ""))
        assert command[:3] == ["curl", "-N", f"{server.address}{api}"]
        assert "mars" in posted(server, api, command[-1])
        line = json.loads(request_text(page, api, "line"))
        assert line["body"].items() < json.loads(command[-1]).items()
    assert serious_faults(page) == []
    page.click("#request-copy")
    page.locator("#request-copy").get_by_text("Copied").wait_for()
    assert json.loads(page.evaluate("navigator.clipboard.readText()")) == line
    program = page.evaluate(
        """async (body) => {
            const { requestText } = await import("/pages/playground/snippets.js");
            return requestText({ chat: false }, body, "/v1/completions", "python", false);
        }""",
        {"model": "measured", "prompt": "What?", "max_tokens": 3, "mode": "ar", "stream": True},
    )
    assert printed_by(program)


def test_a_batch_is_sent_followed_cancelled_and_saved(open_page, server):
    page, watch = open_page(server, viewport={"width": 360, "height": 740})
    ready(page)
    page.check("input[name=view][value=batches]", force=True)
    page.get_by_text("There are no batches yet.").wait_for()

    def send(name: str, *lines: object) -> Locator:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = {"name": name, "mimeType": "", "buffer": content}
        page.set_input_files("#batch-file", file)
        page.click("#batch-start")
        return page.locator("#batches-list li", has_text=name)

    def line(number: int, **fields: object) -> dict:
        body = {"model": "measured", "prompt": "What?", "max_tokens": 3, **fields}
        return {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}

    send("large", "x" * 2**20)
    page.locator("#notice", has_text="larger than the 1 MiB that this server takes").wait_for()
    send("none", [1])
    page.locator("#notice", has_text="The first line of none is no request").wait_for()
    long = send("<b>long</b>", *(line(number, max_tokens=100) for number in range(200)))
    long.get_by_role("button", name="Cancel").click()
    page.locator("#notice").wait_for(state="hidden")
    failed = send("bad", line(1), line(1))
    good = send("good", line(1), line(2, temperature=9))
    good.get_by_text("2 of 2 lines answered, 1 with an error").wait_for()
    for label, custom_id in (("Save the answers", "1"), ("Save the errors", "2")):
        with page.expect_download() as saved:
            good.get_by_role("button", name=label).click()
        content = Path(saved.value.path()).read_text()
        assert json.loads(content)["custom_id"] == custom_id
    long.get_by_text("cancelled", exact=True).wait_for()
    failed.get_by_text("Line 2: custom_id: an earlier line has '1' as well").wait_for()
    badges = page.locator("#batches-list .badge")
    assert badges.all_inner_texts() == ["completed", "failed", "cancelled"]
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
    assert serious_faults(page) == []
    assert (watch.problems, watch.foreign) == ([], [])
