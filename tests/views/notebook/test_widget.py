"""The explorer in a notebook, from Python: what is chosen, what is asked, how large it is."""

import json
import time

import pytest

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.nn.explain_text import explain_text
from clearhead.views.html.document import WIDGET
from tests.views.test_page import embedded

pytest.importorskip("anywidget")
from clearhead.views.notebook import explore
from tests.fresh_process import run_program

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = "Once upon a time a queen slept. She dreamt."


def widget_script():
    """The script that a notebook imports, for a page without modules."""
    script, exported = WIDGET.read_text().split("export {")
    return f"{script}window.widget = {exported.split()[0]};"


@pytest.fixture
def shown(monkeypatch):
    """A widget, with what it sent."""
    widget = explore(None, TEXT)
    widget.sent = []
    monkeypatch.setattr(type(widget), "send", lambda self, content: self.sent.append(content))
    return widget


def ask(widget, number, path, request):
    widget._receive(widget, {"id": number, "path": path, "request": request}, [])
    for _ in range(2000):
        if not widget._runs:
            break
        time.sleep(0.01)
    return [json.loads(x["line"]) for x in widget.sent if x["id"] == number]


def test_the_page_is_sent_when_a_cell_asks_and_is_not_in_the_notebook(shown):
    state = {k: v for k, v in shown.get_state().items() if k != "layout"}
    assert len(json.dumps(state, default=str)) < 60_000
    shown._receive(shown, {"page": True}, [])
    [message] = shown.sent
    page = message["page"]
    assert embedded(page)["host"] == "notebook" and "queen" in embedded(page)["tokens"]
    assert "connect-src" not in page


def test_a_saved_notebook_shows_the_heads_where_no_python_runs(shown):
    """Viewers without widgets show the cell's HTML, and JupyterLab the state of the widget."""
    bundle = shown._repr_mimebundle_()[0]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    for picture in (bundle["text/html"], shown.get_state()["picture"]):
        assert picture.count("<img") == 8 and "She dreamt." in picture
        assert "Begin with L0H7: antecedent" in picture  # as page and terminal do
        assert "<script" not in picture
    trace = explore(explain_text("The cat sat.", mask=ch.causal))
    assert trace._repr_mimebundle_()[0]["text/html"].count("<img") == 2


def test_the_frame_shows_the_picture_until_the_page_comes(shown, browser):
    tab = browser.new_page()
    script = widget_script()
    tab.set_content("<div id=cell></div>")
    tab.add_script_tag(content=script)
    tab.evaluate(
        """(picture) => { const model = { get: (name) => ({ address: "", picture })[name],
           send() {}, off() {},
           on(name, call) { if (name === "msg:custom") window.receive = call; } };
           window.widget.render({ model, el: document.getElementById("cell") }); }""",
        shown.picture,
    )
    frame = tab.frame_locator("iframe")
    frame.locator("img").first.wait_for()
    assert frame.locator("img").count() == 8
    tab.evaluate("receive({ page: '<p id=page>the page</p>' })")
    frame.locator("#page").wait_for()
    assert frame.locator("img").count() == 0
    tab.close()


def test_the_page_goes_to_what_python_chose_before_it_came(shown, browser):
    shown.head, shown.query = (1, 3), 5
    tab = browser.new_page()
    script = widget_script()
    tab.set_content("<div id=cell></div>")
    tab.add_script_tag(content=script)
    tab.evaluate(
        """(address) => { const model = { get: (name) => ({ address, picture: "" })[name],
           send() {}, off() {}, set() {}, save_changes() {},
           on(name, call) { if (name === "msg:custom") window.receive = call; } };
           window.widget.render({ model, el: document.getElementById("cell") }); }""",
        shown.address,
    )
    tab.evaluate("(page) => receive({ page })", shown._page)
    frame = tab.frame_locator("iframe")
    frame.locator("#head-title", has_text="L1H3").wait_for()
    assert frame.locator("[role=option][aria-selected=true]").inner_text() == "queen"
    tab.close()


def test_a_saved_notebook_shows_the_last_state(shown, browser):
    tab = browser.new_page()
    errors = []
    tab.on("console", lambda it: errors.append(it.text))
    script = widget_script()
    tab.set_content("<div id=cell></div>")
    tab.add_script_tag(content=script)
    render = """(picture) => { window.state = { address: "", picture }; const model = {
        get: (name) => state[name], set: (name, value) => { state[name] = value; },
        send() {}, off() {}, save_changes() {},
        on(name, call) { if (name === "msg:custom") window.receive = call; } };
        document.getElementById("cell").replaceChildren();
        window.widget.render({ model, el: document.getElementById("cell") }); }"""
    tab.evaluate(render, "")
    tab.evaluate("(page) => receive({ page })", shown._page)
    frame = tab.frame_locator("iframe")
    frame.locator("[data-place='1.3']").click()
    frame.locator("[role=option]", has_text="queen").click()
    tab.wait_for_function("() => state.picture.includes('L1H3: queen looks at')")
    shown.set_state({"picture": tab.evaluate("state.picture")})  # as the notebook's server does
    assert shown._repr_mimebundle_()[0]["text/html"].startswith("<img")
    assert len(shown.picture) < 400_000 and errors == []
    tab.evaluate(render, shown.get_state()["picture"])
    image = frame.locator("img[alt*='L1H3: queen looks at']")
    image.wait_for()
    assert image.evaluate("it => it.decode().then(() => it.naturalWidth > 300)")
    tab.close()


def test_an_executed_notebook_shows_what_python_chose_last(shown):
    """As nbconvert executes it, without a browser: the state of the widget has the picture."""
    before = shown.picture
    shown.head, shown.query = (1, 3), "queen"
    state = shown.get_state()
    assert state["picture"] == shown._repr_mimebundle_()[0]["text/html"] != before
    assert "Begin with L1H3" in state["picture"] and "Layer 1:" in state["picture"]
    assert "At &quot;queen&quot; (position 5, counted from 0) it looks at" in state["picture"]
    shown.head = 0, 2
    assert "Begin with L0H2" in shown.picture


def test_a_wrong_choice_shows_its_message_without_the_frames_of_libraries(shown, capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell(colors="nocolor")
    shell.user_ns["shown"] = shown
    shell.run_cell("def choose():\n    shown.head = 9, 0\n\nchoose()")
    printed = capsys.readouterr().out
    assert "choose()" in printed and "shown.head = 9, 0" in printed
    assert "BadValue: Layer 9 was requested." in printed
    assert "Hint: set for example explorer.head = 0, 0." in printed
    assert "traitlets" not in printed and "widget.py" not in printed
    assert len(printed.splitlines()) < 12


def test_a_click_is_seen_in_python(shown):
    seen = []
    shown.observe(lambda change: seen.append((change["name"], change["new"])), ["head", "query"])
    shown.address = "#layer=1&head=3&query=queen&view=lines"
    assert (shown.head, shown.query) == ((1, 3), 5)
    assert sorted(seen) == [("head", (1, 3)), ("query", 5)]
    assert shown.address == "#layer=1&head=3&query=queen&view=lines"  # left as the page wrote it
    shown.address = "#layer=1&head=3&query=none&view=lines"
    assert shown.query is None
    shown.query = 8
    for there_is_none in (
        "layer=x&head=-1&query=nobody",
        "layer=2&head=0&query=11",
        "head=8&view=map",
    ):
        shown.address = "#" + there_is_none  # left out, as in the page
        assert (shown.head, shown.query) == ((1, 3), 8)


def test_what_python_chooses_goes_to_the_page(shown):
    assert (shown.head, shown.query) == ((0, 7), 8)  # with which the page opens
    shown.head, shown.query = (1, 3), 5
    assert shown.address == "#layer=1&head=3&query=5"
    shown.head = 0, 7
    shown.query = 8
    assert shown.address == "#layer=0&head=7&query=8"
    shown.address = "#layer=0&head=7&query=8&view=map"
    shown.query = None
    assert shown.address == "#layer=0&head=7&query=none&view=map"


def test_a_query_is_chosen_by_its_word(shown):
    shown.query = "Queen"
    assert shown.query == 5 and shown.address == "#layer=0&head=7&query=5"
    shown.head, shown.query = [1, -1], -1
    assert (shown.head, shown.query) == ((1, 7), 10)


def test_what_is_not_there_is_refused_and_what_was_chosen_stays(shown):
    shown.head, shown.query = (1, 3), 5
    heads = "heads of layer 1 are counted from 0 to 7; -1 is the last."
    layers = "layers are counted from 0 to 1; -1 is the last."
    queries = "a query is a word of the text, or its position from 0 to 10; -1 is the last."
    set_a_head = "set for example explorer.head = 0, 0."
    set_a_query = "set for example explorer.query = 10, or None for no query."
    for name, value, kind, gave, rule, hint in [
        ("head", (1, 8), BadValue, "Head 8", heads, set_a_head),
        ("head", (2, 0), BadValue, "Layer 2", layers, set_a_head),
        ("head", (1, "a"), BadType, "Head 'a'", heads, set_a_head),
        ("head", 3, BadType, "head=3 was set.", "head is (layer, head).", set_a_head),
        ("query", 11, BadValue, "Query 11", queries, set_a_query),
        ("query", "11", BadValue, "Query '11'", queries, set_a_query),
        ("query", "zebra", BadValue, "Query 'zebra'", queries, set_a_query),
        ("query", "quen", BadValue, "Query 'quen'", queries, "did you mean 'queen'?"),
        ("query", 1.5, BadType, "Query 1.5", queries, set_a_query),
    ]:
        with pytest.raises(kind) as error:
            setattr(shown, name, value)
        assert error.value.gave in (gave, f"{gave} was requested.")
        assert (error.value.rule, error.value.hint) == (rule, hint)
        assert (shown.head, shown.query, shown.address) == ((1, 3), 5, "#layer=1&head=3&query=5")


def test_a_request_is_answered_with_progress(shown):
    lines = ask(shown, "1", "compute", {"text": "He slept.", "edits": {"off": [[0, 1]]}})
    assert lines[:-1] == [{"progress": [n, 2]} for n in (0, 1, 2)]
    assert lines[-1]["snapshot"]["tokens"] == ["He", "slept", "."]
    assert shown.text == "He slept."
    shown.address = "#layer=0&head=1&query=slept"
    assert shown.query == 1
    with pytest.raises(BadValue, match="from 0 to 2"):
        shown.query = 8  # of the text before
    part = {"layer": 0, "head": 1, "queries": [0, 1], "keys": [0, 0]}
    assert ask(shown, "2", "tile", {"text": TEXT, **part})[-1]["layer"]["size"]["k"] == 1
    weight = {"layer": 1, "head": 2, "query": 2, "key": 1}
    why = ask(shown, "4", "why", {"text": "He slept.", **weight})[-1]["why"]
    assert [why[name] for name in weight] == list(weight.values())
    assert ask(shown, "3", "compute", {"text": ""})[-1]["error"]["gave"] == "The text is empty."


def test_a_request_that_is_ended_gets_no_answer(shown):
    with shown._reader._turn:  # the model is busy
        shown._receive(shown, {"id": "1", "path": "compute", "request": {"text": "He slept."}}, [])
        shown._receive(shown, {"id": "1", "end": True}, [])
        shown._receive(shown, {"id": "other", "end": True}, [])
    lines = ask(shown, "2", "compute", {"text": "She slept."})
    assert "snapshot" in lines[-1]
    assert [x["id"] for x in shown.sent if x["id"] == "1"] == []


def test_a_trace_is_explored_without_a_model():
    trace = explain_text("The cat sat.", mask=ch.causal)
    widget = explore(trace)
    assert embedded(widget._page)["host"] == "frame"
    widget.address = "#layer=0&head=1&query=cat"
    assert (widget.head, widget.query) == ((0, 1), 1)
    with pytest.raises(BadValue, match="heads of layer 0 are counted from 0 to 1"):
        widget.head = 0, 2
    widget._receive(widget, {"id": "1", "path": "compute", "request": {"text": "a"}}, [])
    assert not widget._runs


def test_what_cannot_be_explored(tmp_path):
    with pytest.raises(BadType, match="explore got None and None for a text"):
        explore()
    with pytest.raises(BadType, match="a trace has one"):
        explore(explain_text("The cat sat."), "a text")
    with pytest.raises(BadValue, match="is not a checkpoint folder"):
        explore(tmp_path, "a text")


def test_without_anywidget_it_says_what_to_install():
    run = "import sys; sys.modules['anywidget'] = None; from clearhead.views import explore; "
    done = run_program(run + "explore(None, 'a')")
    assert "pip install 'anywidget>=0.9.13'" in done.stderr
