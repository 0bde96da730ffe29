"""The served page in a browser: its source asks the server, and a newer request ends an older."""

import threading
from contextlib import contextmanager

import pytest
import uvicorn

import clearhead as ch
from clearhead import demo
from clearhead.models.report.opening import opening
from clearhead.views import html
from clearhead.views.serve import Reader, edits, server
from clearhead.views.serve.answer import answer
from clearhead_cli.serve import _listen
from tests.views.browser import PLAIN_NAMES
from tests.views.serve.models import save_gpt2, words
from tests.views.test_why_on_page import signed

TEXT = "Once upon a time a queen slept. She dreamt."
TOKEN = "a-token"


@pytest.fixture(scope="module")
def page(browser):
    """For tests that call its source, and leave what it shows."""
    with served_page(browser, Reader(), TEXT) as opened:
        yield opened


@contextmanager
def served_page(browser, reader, shown):
    """The page in a browser; at the end, nothing was refused and nothing failed."""
    listener = _listen(0)
    text = html.report_page(reader.report(shown), host="server")
    served = server.app(reader, text, TOKEN, listener.getsockname()[1])
    with opened_page(browser, served, listener, PLAIN_NAMES) as opened:
        yield opened


@contextmanager
def opened_page(browser, app, listener, script=""):
    """The first page of a served application, with the same check at the end."""
    problems, port = [], listener.getsockname()[1]
    served = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]})
    thread.start()
    opened = browser.new_page()
    opened.add_init_script(script)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda it: it.type == "error" and problems.append(it.text))
    opened.goto(f"http://127.0.0.1:{port}/{app.token}/")
    try:
        yield opened
    finally:
        opened.close()
        served.should_exit = True
        thread.join(20)
    assert not problems


def test_the_source_of_a_served_page_is_the_server(page):
    edits = {"off": [[0, 7]], "temperature": 2, "mask": None, "scale": None, "dropout": 0}
    assert "connects only to the server it came from" in page.locator("footer").text_content()
    found = page.evaluate("edits => remoteSource().compute('He slept.', edits)", edits)
    assert found["tokens"] == ["He", "slept", "."]
    part = {"layer": 1, "head": 2, "queries": [0, 2], "keys": [0, 1]}
    layer = page.evaluate("part => remoteSource().tile('He slept.', {}, part)", part)
    assert layer["steps"][0]["stored"] == [1, 3, 2]


def test_page_and_server_know_the_same_edits(page):
    given = {"off": [[0, 7]], "temperature": 2, "scale": 0.5, "mask": "causal", "softcap": 30,
             "dropout": 0.5, "seed": 7}  # fmt: skip
    asked = page.evaluate(
        "[remoteSource().can.edits, liveSource().can.edits, Object.keys(NO_EDITS)]"
    )
    assert asked == 3 * [list(edits.EDITS)] == 3 * [list(given)]
    read = page.evaluate(
        "it => readEdits('edits=' + encodeURIComponent(JSON.stringify(it)))", given
    )
    assert read == given
    assert len(edits.read_edits(given)) == 4  # one holds scale, softcap, dropout and its seed


def test_errors_are_told_in_three_parts(page):
    told = page.evaluate("remoteSource().compute('', {}).catch((error) => error.message)")
    assert told == (
        "The text is empty. Rule: a text has at least one word and at most 200,000 letters. "
        "Hint: type a text."
    )


def test_a_newer_request_ends_an_older_one(page):
    ended, found = page.evaluate(
        """() => {
          const source = remoteSource();
          const older = source.compute("He slept.", {}).catch((error) => error.name);
          return Promise.all([older, source.compute("She sang.", {})]);
        }"""
    )
    assert ended == "AbortError" and found["tokens"][:2] == ["She", "sang"]


def test_a_part_of_a_long_text_exactly(browser, tmp_path):
    """Its map is pooled; the host computes the weights around the chosen query and key."""
    pytest.importorskip("transformers")
    reader = Reader(save_gpt2(tmp_path, longest=700))
    text = words(650)
    with served_page(browser, reader, text) as page:
        page.evaluate("go({ view: 'map', layer: 1, head: 2, query: 600, key: 598 })")
        query = page.evaluate("chosen.query")  # the nearest of those that the page holds
        assert page.evaluate("shownTrace().bins") < [650, 650]
        page.locator("#zoom").click()
        page.wait_for_function("() => isZoomed()")
        assert page.evaluate("[zoomed.first.q, zoomed.first.k]") == [query - 16, 582]
        exact = reader.tile(text, 1, 2, range(query, query + 1), range(598, 599))["weights"]
        assert page.evaluate(f"zoomedWeight({query}, 598)") == pytest.approx(exact.item(), rel=1e-5)
        assert "weight 0.0" in page.locator("#reading").text_content()
        page.set_viewport_size({"width": 1280, "height": 600})  # without room for labels
        shown = "picture.shapes.filter((it) => it.kind === 'text').map((it) => it.text)"
        page.wait_for_function(f"() => {shown}.includes('L1H2, exactly  w18 → w4')")
        # A cell of the part is pointed at in positions of the text.
        cell = "(({ x, y, cell }) => picture.under(x + 3.5 * cell, y + 2.5 * cell)"
        cell += ".of(x + 3.5 * cell, y + 2.5 * cell))(picture.map)"
        assert page.evaluate(cell) == {"query": query - 14, "key": 585}
        page.locator("#zoom").click()
        assert page.evaluate("isZoomed()") is False
        page.locator("#zoom").click()
        page.wait_for_function("() => isZoomed()")
        page.evaluate("go({ head: 0 })")
        assert page.evaluate("isZoomed()") is False


def test_an_edit_of_a_long_text_that_changes_no_number_is_no_edit(browser, tmp_path):
    """Of such a text the page holds no output, and without a head of the last layer its weights are
    the same: a digest of the outputs tells the two apart."""
    pytest.importorskip("transformers")
    reader = Reader(save_gpt2(tmp_path, longest=700))
    with served_page(browser, reader, words(650)) as page:
        page.locator("#whatif").click()
        page.locator("#edit-mask").fill("window(5000, 0)")
        page.locator("#edit-mask").blur()
        page.wait_for_function("() => chosen.edits.mask === 'window(5000, 0)'")
        assert page.evaluate("edited") is None
        assert "changes no number" in page.locator("#edit-said").text_content()
        page.evaluate("go({ view: 'map', layer: 1, head: 2 })")
        page.locator("#edit-off").click()
        page.wait_for_function("() => edited !== null")
        assert page.locator("#edit-said").text_content() == ""


def test_a_run_is_stopped(browser):
    """The button ends the run where it is computed, and the text is the one before."""
    with served_page(browser, Reader(), TEXT) as page:
        page.evaluate(
            """() => {
              let no;
              source.compute = () => new Promise((_, reject) => { no = reject; });
              source.cancel = () => no(new Error("ended"));
            }"""
        )
        assert page.locator("#stop").is_hidden()
        page.locator("#text").fill("He slept.")
        page.locator("#stop").click()
        assert page.locator("#stop").is_hidden()
        assert page.locator("#text").input_value() == TEXT
        assert page.locator("#typed").text_content() == "Stopped. The text is the earlier one."
        assert page.evaluate("current.text") == TEXT


def test_steps_that_the_page_lacks_are_computed_when_they_are_needed(
    browser, tmp_path, monkeypatch
):
    from clearhead.views.html import report

    none = report.SMALL._replace(all_steps=0, steps=0)
    monkeypatch.setattr(report.snapshot, "__defaults__", (none,))
    monkeypatch.setitem(report.report_page.__kwdefaults__, "budget", none)
    reader, text = Reader(save_gpt2(tmp_path)), words(9)
    with served_page(browser, reader, text) as opened:
        opened.goto(f"{opened.url.split('#')[0]}#layer=1&head=2&view=numbers")
        opened.reload()
        opened.locator("#panel article[data-step=query]").wait_for()
        opened.locator("#panel", has_not_text="Computing").wait_for()
        opened.locator(".stages button", has_text="scores").click()
        assert "computing" not in opened.locator("#panel").text_content().lower()
        shown = opened.locator("#panel article[data-step=scores]").text_content()
        right = reader.model.explain(text, 1)["scores"][0, 2, 8].tolist()
        assert any(f"{x:.3f}"[:5] in shown for x in right)


def test_steps_of_a_long_text_have_every_query(browser, tmp_path, monkeypatch):
    from clearhead.views.html import report

    none = report.SMALL._replace(all_steps=0, steps=0)
    monkeypatch.setitem(report.report_page.__kwdefaults__, "budget", none)
    reader, text = Reader(save_gpt2(tmp_path, heads=5, longest=512)), words(300)
    right = reader.model.explain(text, 1)
    with served_page(browser, reader, text) as opened:
        opened.goto(f"{opened.url.split('#')[0]}#layer=1&head=2&query=41&view=numbers")
        opened.reload()
        opened.wait_for_function("() => shownTrace().step('scores')?.isExact(2)")
        assert opened.evaluate("shownTrace().stored(2).length") == 300
        for step in "scores", "weights":
            row = opened.evaluate(f"shownTrace().row(shownTrace().step('{step}'), 2, 41)")
            assert row == pytest.approx(right[step][0, 2, 41].tolist(), rel=1e-4, abs=1e-6)
        assert "L1H2: " in opened.locator("#sentence").inner_text()
        assert "does not have" not in opened.locator("#app").inner_text()


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_a_walk_begins_when_its_steps_arrive(browser, tmp_path, monkeypatch, motion):
    from clearhead.views.html import report

    none = report.SMALL._replace(all_steps=0, steps=0)
    monkeypatch.setitem(report.report_page.__kwdefaults__, "budget", none)
    with served_page(browser, Reader(save_gpt2(tmp_path)), words(9)) as opened:
        opened.emulate_media(reduced_motion=motion)
        assert not opened.evaluate("shownTrace().step('scores').isExact(chosen.head)")
        opened.locator("#view-walk").click()
        opened.wait_for_function("() => shownTrace().step('scores').isExact(chosen.head)")
        if motion == "reduce":
            opened.wait_for_function("() => picture !== null")
            stages = opened.evaluate("Number(byId('scrub').max)")
            assert stages >= 6 and opened.evaluate("walk.at") == stages
        else:
            opened.wait_for_function("() => walk.isPlaying && walk.at > 0.05")


def test_a_layer_of_steps_is_that_of_explain(tmp_path):
    reader = Reader(save_gpt2(tmp_path))
    found = answer(reader, "steps", {"text": words(9), "layer": 1}, lambda *_: None)["layer"]
    assert [step["name"] for step in found["steps"]][:3] == ["query", "key", "value"]
    assert found["size"]["h"] == 3
    refused = answer(reader, "steps", {"text": words(9), "layer": 7}, lambda *_: None)
    assert "layer 7" in refused["error"]["gave"]


def test_another_text_begins_at_its_own_head_until_one_is_chosen(browser):
    teller = demo.load()
    reader = Reader(demo.Storyteller(teller.model, teller.vocabulary, {}))
    first, second = "Long ago there was a witch. She took her", "The cat sat because it was tired."
    begins = [opening(reader.report(text)) for text in (first, second)]
    assert all(x.writer for x in begins) and begins[0].head.head != begins[1].head.head
    chosen = "[chosen.layer, chosen.head, chosen.query]"
    with served_page(browser, reader, first) as page:
        for text, begin in zip((first, second), begins, strict=True):
            page.locator("#text").fill(text)
            page.wait_for_function("text => store.current.text === text", arg=text)
            assert page.evaluate(chosen) == [begin.head.layer, begin.head.head, begin.query]
        page.evaluate("go({ layer: 0, head: 3 })")
        page.locator("#text").fill(first)
        page.wait_for_function("text => store.current.text === text", arg=first)
        assert page.evaluate(chosen)[:2] == [0, 3]


WEIGHT = {"layer": 1, "head": 2, "query": 9, "key": 4}
SIGNED = """(kind) => [...document.querySelectorAll('#panel table')]
  .find((it) => it.caption.textContent.startsWith(`What wrote the ${kind}`))
  .querySelectorAll('tbody tr').values().map((row) => row.cells[2].textContent).toArray()"""


@pytest.mark.parametrize("given", [{}, {"off": [[0, 1]]}, {"temperature": 2}])
def test_why_of_a_host_is_that_of_the_edited_model(given):
    reader = Reader()
    told = answer(reader, "why", {"text": TEXT, "edits": given, **WEIGHT}, lambda *_: None)["why"]
    inputs = reader.model.tokens_and_inputs(TEXT)[1]
    with ch.intervene(reader.model.module, edits.read_edits(given)):
        why = ch.why(reader.model.module, inputs, **WEIGHT)
    for of in ("key", "query"):
        parts = why.largest(of, len(why.components))
        side = told[f"wrote_{of}"]
        assert [(it["name"], it["part"]) for it in side["parts"]] == [
            (str(component), pytest.approx(part)) for component, part in parts[:6]
        ]
        assert side["others"] == (len(parts) - 6, pytest.approx(sum(x for _, x in parts[6:])))
        assert side["total"] == pytest.approx(why.contrast, abs=1e-5)
        for it, (component, part) in zip(side["parts"], parts, strict=False):
            if component.kind == "head":
                read = why.sources(component.layer, component.head, of)
                assert it["source"] == int((read if part > 0 else -read).argmax())
    edited = reader.tile(TEXT, 1, 2, range(9, 10), range(4, 5), given)["weights"].item()
    assert told["weight"] == pytest.approx(edited, abs=1e-5)


def test_a_served_page_compares_with_what_one_chooses(browser):
    own = Reader().model
    inputs = own.tokens_and_inputs(TEXT)[1]
    with served_page(browser, Reader(), TEXT) as page:
        page.evaluate("it => go({ ...it, view: 'why' })", WEIGHT)
        page.locator("#panel table").first.wait_for()
        choices = page.locator("#against option").evaluate_all("them => them.map((it) => it.value)")
        assert choices[:3] == ["others", "weights", "nothing"] and "4" not in choices[3:]
        for against in (choices[3], "nothing", "weights", "others"):
            page.locator("#against").select_option(against)
            to = int(against) if against.isdigit() else against
            why = ch.why(own.module, inputs, **WEIGHT, against=to)
            contrast = page.locator("#panel .hint", has_text=f"contrast {signed(why.contrast)} ")
            contrast.wait_for()
            assert page.evaluate(SIGNED, "key")[:6] == [signed(x) for _, x in why.largest("key")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"against": 99}, "A contrast with key 99"),
        ({"against": "all"}, "why got against='all'"),
        ({"query": 4, "key": 9}, "Query 4 looks at 5 keys"),
        ({"layer": 7}, "Layer 7 was requested"),
        ({"key": None}, "key=None"),
        ({"query": "She"}, "query='She'"),
    ],
)
def test_a_host_refuses_a_weight_that_is_not_there(changes, words):
    request = {"text": TEXT, **WEIGHT, **changes}
    refused = answer(Reader(), "why", request, lambda *_: None)
    assert refused["error"]["gave"].startswith(words)


def test_a_served_page_walks_a_circuit_back(browser):
    reader = Reader()
    with served_page(browser, reader, TEXT) as page:
        page.evaluate("it => go({ ...it, view: 'why' })", WEIGHT)
        page.locator("#panel table").first.wait_for()
        inputs = reader.model.tokens_and_inputs(TEXT)[1]
        why = ch.why(reader.model.module, inputs, **WEIGHT)
        for of in ("key", "query"):
            shown = [signed(part) for _, part in why.largest(of)]
            assert page.evaluate(SIGNED, of)[:6] == shown
        component, _ = next(x for x in why.largest("query") if x[0].kind == "head")
        sentence = page.locator("#panel .because")
        page.locator(f"#panel [data-head='{component.layer}.{component.head}']").last.click()
        sentence.filter(has_text=f"L{component.layer}H{component.head} at ").wait_for()
        sentence.filter(has_text="because").wait_for()
        assert page.evaluate("[chosen.layer, chosen.head, chosen.query]") == [
            component.layer,
            component.head,
            WEIGHT["query"],
        ]
        assert page.locator(".trail button").text_content() == "L1H2"
        # A refusal of the host is a sentence, and the next weight has numbers again.
        page.evaluate("go({ layer: 1, head: 2, query: 0, key: 0 })")
        sentence.filter(has_text="Rule:").wait_for()
        assert "Query 0 looks at 1 keys (0)" in sentence.text_content()
        assert page.locator("#panel table").count() == 0
        page.evaluate("go({ layer: 1, head: 2, query: 9, key: 3 })")
        page.locator("#panel table").first.wait_for()
        given = {"off": [[0, 1]]}
        page.evaluate("given => edit(given)", given)
        page.wait_for_function("() => edited !== null")
        words = page.locator("#panel .hint", has_text="With the edits of What if.")
        words.wait_for()
        weight = reader.tile(TEXT, 1, 2, range(9, 10), range(3, 4), given)["weights"].item()
        assert f"Weight {weight:.3f}," in words.text_content()
        page.evaluate("edit({ off: [] })")
        page.wait_for_function("() => edited === null")
        page.locator("#text").fill("He slept.")
        page.wait_for_function("() => current.tokens.length === 3")
        page.evaluate("go({ layer: 1, head: 2, query: 2, key: 1 })")
        page.locator("#panel caption", has_text="slept (1)").first.wait_for()
