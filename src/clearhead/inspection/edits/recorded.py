"""What `watch` recorded of another run, found for the call that is being answered."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...errors import BadType, BadValue, kind_of
from ...masks.text_positions import Positions, per_text
from ...problem.problem import Problem
from ..recording import Call, Recording
from .edit import Edit, Here


def check_recording(edit: Edit, name: str, recording: object) -> None:
    if not isinstance(recording, Recording):
        raise BadType(
            f"{type(edit).__name__} got {name}={kind_of(recording)}.",
            f"{name} is what watch recorded of another run.",
            "pass what `with watch(...) as recording` gives.",
        )
    if not recording.calls:
        kept = "keeps its calls in files" if recording.written else "holds no calls"
        raise BadValue(
            f"{type(edit).__name__} got a recording that {kept}.",
            "another run is recorded in memory before it is used.",
            "run the model inside of watch(model, ...) without to=.",
        )


def calls_of(edit: Edit, recording: Recording | None, here: Here) -> list[Call]:
    """The recorded calls of the layer."""
    assert recording is not None
    found = [call for call in recording if call.layer == here.layer]
    if not found:
        layers = sorted({call.layer for call in recording})
        raise BadValue(
            f"{edit!r} was applied in layer {here.layer}.",
            f"its recording holds the layers {', '.join(map(str, layers))}.",
            "name these with layers=, or record more.",
        )
    return found


def call_for(edit: Edit, recording: Recording, here: Here) -> Call:
    """The recorded call that serves the one that is being answered."""
    found = calls_of(edit, recording, here)
    if len(found) == 1:
        return found[0]
    if here.call >= len(found):
        raise BadValue(
            f"{edit!r} was applied to call {here.call} of layer {here.layer}.",
            f"its recording holds {len(found)} calls of the layer, and call n serves call n.",
            "record as many runs, or one alone, which serves every call.",
        )
    return found[here.call]


@dataclass(frozen=True, eq=False, repr=False)
class FromRecording(Edit):
    """An edit that takes what another run recorded."""

    recording: Recording

    def __post_init__(self) -> None:
        super().__post_init__()
        check_recording(self, "recording", self.recording)

    def arguments(self) -> list[str]:
        return [f"<{len(self.recording)} calls>"]

    def for_copy(self, batch: range) -> Edit | None:
        """None where each text of the batch has a recording of its own."""
        one = all(len(x) == 1 for call in self.recording for x in _recorded(call))
        return super().for_copy(batch) if one else None

    def reads(self, here: Here) -> tuple[int, ...]:
        several = sum(call.layer == here.layer for call in self.recording) > 1
        return (here.layer, here.call) if several else (here.layer,)


def _recorded(call: Call) -> list[Tensor]:
    """What edits read of a call."""
    rows = call.found.get("exact_rows")
    return [x for x in (call.output, rows) if isinstance(x, Tensor)]


def texts_in(edit: FromRecording, call: Call, problem: Problem, recorded: Tensor) -> Tensor:
    """What was recorded of the texts that the edit is about, in their order: row b of text b. A
    recording of one text serves every text."""
    count, texts = len(recorded), edit.batch_of(problem)
    if count == 1:
        return recorded
    missing = [b for b in texts if b >= count]
    if missing or (edit.batch is None and count != problem.B):
        raise BadValue(
            f"{edit!r} has {count} texts recorded in layer {call.layer}; the batch has "
            f"{problem.B}.",
            "what was recorded of text b serves text b, and a recording of one text every text.",
            f"name the texts that were recorded, for example "
            f"batch=range({min(count, problem.B)}), or record this batch.",
        )
    return recorded[texts]


def check_columns(edit: Edit, call: Call, problem: Problem, here: Here) -> None:
    """Raise `BadValue` if the texts of the edit do not begin in the columns in which those of the
    recording did."""
    recorded, given = (_begins(at, problem) for at in (call.at, here.at))
    for b in edit.batch_of(problem):
        was, now = (x[b if len(x) > 1 else 0] for x in (recorded, given))
        if was != now:
            raise BadValue(
                f"{edit!r} is about text {b}, whose first query and key are columns {now}; in the "
                f"recording they were {was}.",
                "what another run gave is about the same tokens, so both are padded alike.",
                "record a batch that is padded in the same way.",
            )


def _begins(at: Positions, problem: Problem) -> list[tuple[int, int]]:
    """The columns of the first real query and key of each text; one for all if they are alike."""
    both = (
        at.real_queries(problem.Tq)[0],
        per_text(lambda key: at.dropped - key, at.first_key),
    )
    size = max(len(x) if isinstance(x, tuple) else 1 for x in both)
    columns = [x if isinstance(x, tuple) else (x,) * size for x in both]
    return list(zip(*columns, strict=True))


def heads_in(edit: Edit, call: Call, problem: Problem, recorded: Tensor) -> list[int]:
    """Where the heads that the edit is about stand in what was recorded, (B, heads, ...)."""
    wanted = edit.heads_of(problem)
    if call.heads is None:
        if recorded.shape[1] != problem.H:
            raise other_sizes(edit, "H,", recorded.shape[1:2], (problem.H,))
        return wanted
    missing = sorted(set(wanted) - set(call.heads))
    if missing:
        raise BadValue(
            f"{edit!r} is about heads {missing} of layer {call.layer}.",
            f"its recording holds the heads {', '.join(map(str, call.heads))} of that layer.",
            "name these with heads=, or record more.",
        )
    return [call.heads.index(h) for h in wanted]


def output_of(edit: Edit, call: Call) -> Tensor:
    if call.output is None:
        raise BadValue(
            f"{edit!r} was given a recording without outputs.",
            "what replaces an output is an output of another run.",
            "record them: watch(model, outputs=True).",
        )
    return call.output


def other_sizes(
    edit: Edit, letters: str, recorded: Sequence[int], sizes: Sequence[int]
) -> BadValue:
    return BadValue(
        f"{edit!r} was recorded with ({letters}) = {tuple(recorded)}; this call has "
        f"{tuple(sizes)}.",
        "what another run gave fits a call of the same sizes.",
        "record a text of as many tokens, in the same steps.",
    )
