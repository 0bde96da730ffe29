"""Models that a command loads by a name: of the hub, or of a file of GGUF that is broken."""

import pytest
from typer.testing import CliRunner

from clearhead.core.errors import BadValue
from clearhead.views.load import load_text_model
from clearhead_cli import app
from tests.views.serve.models import save_gpt2, words
from tests.views.test_page import embedded


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The local cache of the hub with one model, toy/reader."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--toy--reader"
    save_gpt2(model / "snapshots" / "0123abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123abc")


def test_a_model_of_the_hub_is_loaded_from_the_local_cache_by_its_name(hub):
    reader = load_text_model("toy/reader")
    assert reader.name == "reader" and reader.depth == 2


def test_the_page_names_the_model_as_it_was_typed(hub, tmp_path, monkeypatch):
    """And not the folder of its files in the cache, which is another on another machine."""
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(
        app, ["look", words(7), "--model", "toy/reader", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    [page] = (tmp_path / "out").glob("*.html")
    assert embedded(page.read_text())["folder"] == "toy/reader"
    [numbers] = (tmp_path / "out").glob("*.json")
    assert '"folder": "toy/reader"' in numbers.read_text()


def test_the_error_for_another_has_the_command_that_downloads_it(hub):
    with pytest.raises(BadValue) as error:
        load_text_model("toy/writer")
    assert error.value.gave.startswith("'toy/writer' is neither a path that exists")
    assert "hf download toy/writer --include" in error.value.hint


@pytest.mark.parametrize(
    "content", [b"", b"some text\n", bytes(range(256)), b"GGUF" + b"\x07" * 97]
)
def test_a_broken_file_of_gguf_is_called_that(tmp_path, content):
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(BadValue) as error:
        load_text_model(file)
    assert error.value.gave.startswith(f"The GGUF file {str(file)!r} is broken")
