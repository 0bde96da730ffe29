"""Measure how the cost of a survey around the model grows with the number of shards.

    python -m bench.survey_size --shards 1000 10000 100000

It plans, claims and merges shards of one context of 8 tokens, of a model of one layer and two heads
that does not run: a worker claims each shard, and writes the state of the first one as its own. It
folds the states, and writes the tables. The folder is that of temporary files, TMPDIR. Each number
of shards has a process of its own. Times are processor times, because other programs may share the
machine. Memory is the peak of the process, of which torch and DuckDB take a part.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import clearhead as ch
from clearhead.core.files import atomic_io
from clearhead.corpus import state, steps
from clearhead.corpus.basic import First
from clearhead.corpus.claims import share
from clearhead.corpus.fold import Fold
from clearhead.corpus.merge import merge
from clearhead.corpus.state import TEXTS, TOTALS

WORDS = 8


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the numbers 0 to 31."""
    model = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="0")


class Even(nn.Module):
    """A layer whose two heads have even weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(*input_ids.shape[:1], 2, input_ids.shape[1], 2)
        return ch.attention(x, x, x, mask=ch.causal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--one", action="store_true", help="in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(row(arguments.shards[0]))
        return
    print("| shards | plan | claim | fold | tables | microseconds a shard | peak memory |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for count in arguments.shards:
        command = [sys.executable, "-m", "bench.survey_size", "--one", "--shards", str(count)]
        subprocess.run(command, check=True)


def texts(count: int) -> Iterator[str]:
    for number in range(count):
        yield " ".join(str((number * 7 + i) % 32) for i in range(WORDS))


def row(count: int) -> str:
    torch.set_num_threads(1)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        setup = steps.make_setup(Even(), 2 * WORDS, 0, [First()], words(), shard_tokens=WORDS)
        start = time.process_time()
        manifest = steps.prepare(setup, texts(count), out)
        seconds.append(time.process_time() - start)
        assert len(manifest.shards) == count
        first = steps.compute_shard(setup, out, manifest, manifest.shards[0])
        tensors, about = atomic_io.read(first)
        start = time.process_time()
        shards = list(enumerate(manifest.shards))
        files = {entry.state: out / state.FOLDER / entry.state for entry in manifest.shards}
        names = (lambda shard: shard[1].state), (lambda shard: files[shard[1].state].exists())
        for number, entry in share(out, shards[1:], *names):
            write_as(files[entry.state], manifest.origin(entry), number, tensors, about)
        seconds.append(time.process_time() - start)
        start = time.process_time()
        Fold(out, manifest).share()
        seconds.append(time.process_time() - start)
        start = time.process_time()
        merge(out)
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    times = " | ".join(f"{x:.1f} s" for x in seconds)
    each = ", ".join(f"{x / count * 1e6:.0f}" for x in seconds)
    return f"| {count:,} | {times} | {each} | {peak:.2f} GB |"


def write_as(path: Path, origin: str, number: int, tensors: dict, about: dict) -> None:
    """Write a state as that of another shard: its text has another number."""
    own = tensors | {f"{TEXTS}numbers": state.packed(torch.tensor([number]).numpy())}
    known = {name: x for name, x in about.items() if name not in ("digests", "origin")}
    state.write_parts(path, origin, own, known, (TEXTS, TOTALS))


if __name__ == "__main__":
    main()
