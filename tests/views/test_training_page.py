"""The page of a training: its data, what it says first, and its film in a browser."""

import math

import pytest

import clearhead as ch
from clearhead.views import html
from clearhead.views.html import schema
from clearhead.views.html.training import MOST_STEPS
from tests.views.test_page import embedded
from tests.views.test_page_bundle import misfit

pytest.importorskip("duckdb", reason="the numbers of a training are in Parquet files")
STEPS = (0, 10, 20, 30, 40, 50, 60)
ANTECEDENT = (0.02, 0.05, 0.1, 0.5, 0.6, 0.8, 0.9)
LARGEST = (3.0, 3.0, 3.0, 31.0, 30.0, 30.0, 30.0)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Two layers of two and three heads; L1H2 dies, and L1H1 has no number at the end."""
    folder = tmp_path_factory.mktemp("run")
    write = ch.monitor.parquet(folder)
    for i, step in enumerate(STEPS):
        row = {}
        for layer, head in (0, 0), (0, 1), (1, 0), (1, 1), (1, 2):
            row |= {
                f"attention/L{layer}/H{head}/max": LARGEST[i] if (layer, head) == (0, 1) else 2.0,
                f"attention/L{layer}/H{head}/output": 1e-5 if head == 2 and i > 3 else 1.0,
                f"attention/L{layer}/H{head}/first": 0.95 if head == 0 and i > 4 - layer else 0.1,
                f"attention/L{layer}/H{head}/antecedent": ANTECEDENT[i] if layer > head else 0.01,
            }
        if i == len(STEPS) - 1:
            row["attention/L1/H1/max"] = math.nan
        write(row, step)
    return ch.monitor.read(folder)


def test_the_findings(history):
    assert [x.sentence for x in history.findings()] == [
        "L0H1 rose most in max: 3 at step 0, 30 at step 60, more than half-way since step 30.",
        "Dead heads, which write less than a thousandth of others, at step 60: 1 of 5 heads, "
        "L1H2 since step 40.",
        "Sinks, with over 0.9 of their weight on the first token, at step 60: 2 of 5 heads, L1H0 "
        "since step 40, L0H0 since step 50.",
        "L1H0 rose most in antecedent: 0.02 at step 0, 0.9 at step 60, more than half-way since "
        "step 30.",
        "Step 30: the largest logit of L0H1 is 31; before, it was 3.",
        "Step 40: L1H2 writes 1e-05 of what a head of its layer writes.",
        "Step 60: the largest logit of 1 head of layer 1 is NaN.",
    ]
    assert all(x.sentence in repr(history) for x in history.findings())


def test_the_data_fit_the_schema_and_equal_the_history(history):
    document = html.training_page(history, title="<script>&")
    assert "<script>&" not in document
    data = embedded(document)
    assert misfit(data, schema.TrainingPage) is None
    assert data["steps"] == [*STEPS] and data["heads"] == [[*x] for x in history.heads]
    assert data["values"]["max"]["stored"] == [len(STEPS), 5]
    first = data["findings"][0]
    assert first[1:] == ["max", 1, 30]
    with pytest.raises(ch.BadType, match=r"ch\.monitor\.read"):
        html.training_page("run")


def test_a_long_run_is_thinned_and_says_so(tmp_path):
    import numpy as np

    from clearhead.models.monitor.history import History

    x = np.ones((3 * MOST_STEPS, 1))
    x[1001] = 200.0  # a step that the page leaves out
    history = History([*range(len(x))], [(0, 0)], {"max": x}, {"max": x > 0})
    document = html.training_page(history)
    data = embedded(document)
    assert len(data["steps"]) == MOST_STEPS and data["steps"][-1] == len(x) - 1
    assert 1001 not in data["steps"] and "shows 600 of these steps" in document
    assert "Step 1001: the largest logit of L0H0 is 200" in data["findings"][-1][0]


def test_the_page_in_a_browser(history, browser, tmp_path):
    path = html.write_training(history, tmp_path / "film.html", title="A run")
    from playwright.sync_api import expect

    page, happened = browser.new_page(viewport={"width": 1280, "height": 900}), []
    page.on("pageerror", lambda error: happened.append(error))
    page.on("console", lambda it: happened.append(it.text))
    page.on("request", lambda it: happened.append(it.url) if it.url[:4] != "file" else None)
    page.goto(path.as_uri())
    # The first finding is open, at the end.
    assert page.inner_text("#findings").startswith("L0H1 rose most in max")
    assert page.inner_text("#reading") == "L0H1, step 60: max 30.00"
    assert page.locator("#lines path.line").count() == 5
    assert page.locator("#lines path.mark").count() == 3  # L0H1 rose, its alarm, and NaN
    # The line of a head without a number ends before the last step.
    ends = [it.split("L")[-1].split(" ")[0] for it in lines_of(page)]
    assert float(ends[3]) < float(ends[0]) == max(map(float, ends))
    # Another finding selects its metric, head and step.
    page.locator("#findings button", has_text="antecedent").click()
    assert page.input_value("#metric") == "antecedent"
    assert page.inner_text("#reading") == "L1H0, step 30: antecedent 0.500"
    assert "metric=antecedent&head=L1H0&step=30" in page.url
    chosen = page.get_attribute("#lines path.chosen", "d")
    assert chosen == lines_of(page)[2]
    # A click on a cell selects the head's line, and pointing names the head.
    page.locator("#cell-1").click()
    assert page.get_attribute("#lines path.chosen", "d") == lines_of(page)[1] != chosen
    page.mouse.move(0, 0)
    box = page.locator("#cells").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + (box["height"] - 22) * 0.5)
    assert page.inner_text("#reading").startswith("L1H0, step ")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + (box["height"] - 22) * 0.5)
    assert page.input_value("#head") == "2" and "head=L1H0&step=30" in page.url
    # Keys, and the film.
    page.locator("#cell-2").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # there is no further head in this layer
    assert page.input_value("#head") == "1"
    assert page.evaluate("document.activeElement.id") == "cell-1"
    assert page.locator("#frame button[tabindex='0']").count() == 1
    page.keyboard.press("l")
    page.locator("h1").click()
    page.keyboard.press("l")
    page.keyboard.press("m")
    assert page.inner_text("#reading") == "L1H1, step 30: max 2.000"
    page.locator("#step").focus()
    page.keyboard.press("End")
    assert page.inner_text("#reading") == "L1H1, step 60: max NaN"
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Stop")
    expect(page.locator("#out-step")).to_have_text("step 30")
    expect(page.locator("#play")).to_have_text("Play", timeout=60_000)
    assert page.inner_text("#frame-title") == "All heads at step 60" and "step=60" in page.url
    page.goto(f"{path.as_uri()}#metric=first&head=L0H0&step=40")
    assert page.inner_text("#reading") == "L0H0, step 40: first 0.100"
    assert happened == []
    page.close()


def lines_of(page):
    return page.eval_on_selector_all(
        "#lines path.line", "all => all.map(it => it.getAttribute('d'))"
    )


def test_the_page_fits_a_phone(history, browser, tmp_path):
    path = html.write_training(history, tmp_path / "film.html")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    top = {name: page.locator(name).bounding_box()["y"] for name in ("#frame", "#play", "#lines")}
    assert top["#play"] < top["#frame"] < top["#lines"]
    page.close()
