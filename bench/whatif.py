"""Measure the cost of edits: a model, the model with edges knocked out, and with an eager hook.

    python bench/whatif.py --tokens 2048 8192 32768

The model has the shape of Llama: 2 causal layers, 8 heads of size 64, 2 key heads. The edit hides
the first token from all later ones in every layer. It prints medians of rounds, and the engine.
Eager attention holds a matrix for each head, and is left out above `--eager-up-to` tokens.
"""

import argparse
import statistics
import time
from copy import deepcopy

import torch
import transformers

import clearhead as ch

EDIT = ch.edits.knock_out(ch.prefix(1) & ~ch.window(before=0, after=0))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    ask.add_argument("--eager-up-to", type=int, default=8192)
    ask.add_argument("--rounds", type=int, default=5)
    asked = ask.parse_args()
    ch.hf.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000, max_position_embeddings=max(asked.tokens),
    )  # fmt: skip
    fast = transformers.AutoModel.from_config(config, attn_implementation="clearhead").eval()
    slow = transformers.AutoModel.from_config(deepcopy(config), attn_implementation="eager").eval()
    slow.load_state_dict(fast.state_dict())
    print("| tokens | as it is | knocked out | times | engines | eager with the edit | times |")
    print("|---|---|---|---|---|---|---|")
    for tokens in asked.tokens:
        ids = torch.randint(1000, (1, tokens))
        kinds = {
            "plain": lambda x=ids: fast(x, use_cache=False),
            "edited": lambda x=ids: edited(fast, x),
        }
        if tokens <= asked.eager_up_to:
            kinds["eager"] = lambda x=ids: eager(slow, x)
        times = {name: [] for name in kinds}
        with torch.no_grad():
            outputs = {name: call() for name, call in kinds.items()}
            if "eager" in kinds:
                torch.testing.assert_close(
                    outputs["edited"], outputs["eager"], rtol=1e-3, atol=1e-3
                )
            for _ in range(asked.rounds):
                for name, call in kinds.items():
                    start = time.perf_counter()
                    call()
                    times[name].append(time.perf_counter() - start)
            with ch.intervene(fast, [EDIT]) as done:
                fast(ids, use_cache=False)
        middle = {name: statistics.median(x) for name, x in times.items()}
        ratios = {
            name: statistics.median(a / b for a, b in zip(x, times["plain"], strict=True))
            for name, x in times.items()
        }
        engines = "/".join(sorted({engine for *_, engine in done.applied}))
        cells = [f"{middle['plain']:.2f} s", f"{middle['edited']:.2f} s", f"{ratios['edited']:.2f}"]
        cells += [engines]
        cells += (
            [f"{middle['eager']:.2f} s", f"{ratios['eager']:.1f}"] if "eager" in kinds else ["", ""]
        )
        print(f"| {tokens} |", " | ".join(cells), "|", flush=True)


def edited(model, ids):
    with ch.intervene(model, [EDIT]):
        return model(ids, use_cache=False).last_hidden_state


def eager(model, ids):
    """Make the edit in the usual way: an additive mask, with a full matrix for each head."""
    T = ids.shape[1]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    hidden[1:, 0] = True
    mask = torch.zeros(1, 1, T, T).masked_fill(hidden, torch.finfo(torch.float32).min)
    return model(ids, attention_mask=mask, use_cache=False).last_hidden_state


if __name__ == "__main__":
    main()
