"""Write stories of the storyteller's grammar, one a line, as a corpus for a survey.

python -m examples.stories 1000 out/stories.jsonl
clearhead survey out/stories.jsonl --out out/survey
"""

import json
import sys
from pathlib import Path

from examples.storyteller.grammar import story


def write_stories(count: int, path: Path) -> Path:
    """Write held-out stories, on which the included model was not trained."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": str(story(1, n, "held-out"))}) for n in range(count))
    path.write_text("\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    print(write_stories(int(sys.argv[1]), Path(sys.argv[2])))
