"""Look up what `watch` recorded in another run, for the call that an edit changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....core.errors import BadValue, must_be_of
from ....core.masks.text_positions import Positions, per_text
from ....core.problem.problem import Problem
from ..recording import Call, Recording
from .edit import Edit, EditSite

# The parts of a recorded call that edits read, and the keyword of `watch` that records them.
RECORDED = {"query": "inputs", "key": "inputs", "value": "inputs", "output": "outputs"}


def check_recording(edit: Edit, name: str, recording: Any) -> None:
    rule = f"{name} is a recording of another run by watch."
    hint = "pass the recording of `with watch(...) as recording`."
    must_be_of(Recording, f"{type(edit).__name__} with {name}=", recording, rule, hint)
    if not recording.calls:
        state = "keeps its calls in files" if recording.written else "holds no calls"
        gave = f"{type(edit).__name__} got a recording that {state}."
        hint = "run the model inside watch(model, ...) first, without to=."
        raise BadValue(gave, "an edit reads a recording from memory.", hint)


def calls_of(edit: Edit, recording: Recording | None, site: EditSite) -> list[Call]:
    """Return the recorded calls of the layer. Raises `BadValue` if there are none."""
    assert recording is not None
    calls = [call for call in recording if call.layer == site.layer]
    if not calls:
        layers = sorted({call.layer for call in recording})
        rule = f"its recording has layers {', '.join(map(str, layers))}."
        hint = "select these with layers=, or record more."
        raise BadValue(f"{edit!r} was applied in layer {site.layer}.", rule, hint)
    return calls


def call_for(edit: Edit, recording: Recording, site: EditSite) -> Call:
    """Return the recorded call that matches this one. Raises `BadValue` if there is none."""
    calls = calls_of(edit, recording, site)
    if len(calls) == 1:
        return calls[0]
    if site.call >= len(calls):
        gave = f"{edit!r} was applied to call {site.call} of layer {site.layer}."
        rule = f"its recording has {len(calls)} calls of the layer, and call n reads call n."
        raise BadValue(gave, rule, "record as many runs, or one run, which every call reads.")
    return calls[site.call]


@dataclass(frozen=True, eq=False, repr=False)
class FromRecording(Edit):
    """An edit that reads a recording of another run."""

    recording: Recording

    def __post_init__(self) -> None:
        super().__post_init__()
        check_recording(self, "recording", self.recording)

    def arguments(self) -> list[str]:
        return [f"<{len(self.recording)} calls>"]

    def for_copy(self, batch: range) -> Edit | None:
        """Limit the edit to these rows, or return None if each text has its own recording."""
        one = all(len(x) == 1 for call in self.recording for x in _recorded(call))
        return super().for_copy(batch) if one else None

    def reads(self, site: EditSite) -> tuple[int, ...]:
        several = sum(call.layer == site.layer for call in self.recording) > 1
        return (site.layer, site.call) if several else (site.layer,)


def _recorded(call: Call) -> list[Tensor]:
    """Return the tensors of a recorded call that edits read."""
    tensors = (call.statistics.get("exact_rows"), *(getattr(call, part) for part in RECORDED))
    return [x for x in tensors if isinstance(x, Tensor)]


def texts_in(edit: FromRecording, call: Call, problem: Problem, recorded: Tensor) -> Tensor:
    """Return the recorded rows of the edit's texts, in their order: row b for text b.

    A recording of one text is returned for every text. Raises `BadValue` for missing texts.
    """
    count, texts = len(recorded), edit.batch_of(problem)
    if count == 1:
        return recorded
    missing = [b for b in texts if b >= count]
    if missing or (edit.batch is None and count != problem.B):
        gave = f"{edit!r} has a recording of {count} texts in layer {call.layer}, not {problem.B}."
        rule = "text b reads row b of the recording, and every text reads a recording of one."
        hint = f"pass for example batch=range({min(count, problem.B)}), or record this batch."
        raise BadValue(gave, rule, hint)
    return recorded[texts]


def check_columns(edit: Edit, call: Call, problem: Problem, site: EditSite) -> None:
    """Raise `BadValue` unless the edit's texts begin in the same columns as in the recording.

    For an edit `of_keys`, only the columns of keys are compared.
    """
    recorded, current = (_first_columns(at, problem) for at in (call.at, site.at))
    for b in edit.batch_of(problem):
        was, now = (x[b if len(x) > 1 else 0] for x in (recorded, current))
        if was[edit.of_keys :] != now[edit.of_keys :]:
            gave = f"{edit!r} has text {b} with first query and key in columns {now}, not {was}."
            rule = "a text has the same padding in both runs."
            raise BadValue(gave, rule, "record a batch with the same padding.")


def _first_columns(at: Positions, problem: Problem) -> list[tuple[int, int]]:
    """Return the columns of the first real query and key of each text, one pair if all agree."""
    both = (at.real_queries(problem.Tq)[0], per_text(lambda key: at.dropped - key, at.first_key))
    size = max(len(x) if isinstance(x, tuple) else 1 for x in both)
    columns = [x if isinstance(x, tuple) else (x,) * size for x in both]
    return list(zip(*columns, strict=True))


def heads_in(edit: Edit, call: Call, problem: Problem, recorded: Tensor) -> list[int]:
    """Return the indices of the edit's heads in a recorded tensor, (B, heads, ...).

    For an edit `of_keys`, these are KV heads, all of which are recorded. Raises `BadValue` for
    heads that were not recorded.
    """
    wanted, count = edit.heads_of(problem), edit.head_count(problem)
    if call.heads is None or edit.of_keys:
        if recorded.shape[1] != count:
            raise other_sizes(edit, "G," if edit.of_keys else "H,", recorded.shape[1:2], (count,))
        return wanted
    missing = sorted(set(wanted) - set(call.heads))
    if missing:
        rule = f"its recording has heads {', '.join(map(str, call.heads))} of that layer."
        hint = "select these with heads=, or record more."
        raise BadValue(f"{edit!r} selects heads {missing} of layer {call.layer}.", rule, hint)
    return [call.heads.index(h) for h in wanted]


def recorded_part(edit: Edit, call: Call, part: str) -> Tensor:
    """Return the recorded query, key, value or output. Raises `BadValue` if it is missing."""
    x: Tensor | None = getattr(call, part)
    if x is None:
        plural = "queries" if part == "query" else f"{part}s"
        rule = f"{plural} are replaced by {plural} of another run."
        hint = f"record them: watch(model, {RECORDED[part]}=True)."
        raise BadValue(f"{edit!r} has a recording without {plural}.", rule, hint)
    return x


def other_sizes(
    edit: Edit, letters: str, recorded: Sequence[int], sizes: Sequence[int]
) -> BadValue:
    gave = f"{edit!r} was recorded with ({letters}) = {tuple(recorded)}, not {tuple(sizes)}."
    rule = "the recorded call has the same sizes as this one."
    return BadValue(gave, rule, "record a text of the same length, in the same steps.")
