"""Find the patches of an image among the tokens of attention calls, from a run of the model."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...core.functional.ambient import FollowedCall
from ...core.problem.problem import Inputs, Problem
from ...core.stats import Statistics
from ...core.torch_state import loadable
from ...hf.architectures import BEFORE_PATCHES
from .run import ModelFollower
from .text_stack import Running

LARGEST = 448  # pixels on a side of a stored image


@loadable
@dataclass(frozen=True, eq=False)
class Picture:
    """An image whose patches are tokens of a call, row by row.

    Attributes:
        before, after: the names of the tokens before the first patch, such as "[CLS]", and after
            the last; None for one of a text, which is numbered.
        rows, columns: the grid of patches. Both count from 0.
        pixels: the image that the model received, in bytes, (height, width, 3). Each colour is
            stretched from 0 to 255, because models receive colours without their mean and scale.
    """

    before: tuple[str | None, ...]
    rows: int
    columns: int
    pixels: Tensor = field(repr=False)
    after: tuple[str | None, ...] = ()

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The name of each token: "[CLS]", and "patch 2,5" in row 2, column 5."""
        patches = (f"patch {r},{c}" for r in range(self.rows) for c in range(self.columns))
        names = enumerate((*self.before, *patches, *self.after))
        return tuple(str(i) if name is None else name for i, name in names)

    @property
    def patches(self) -> slice:
        """The tokens that are patches."""
        return slice(len(self.before), len(self.before) + self.rows * self.columns)

    @property
    def in_text(self) -> bool:
        """Whether other tokens are of a text."""
        return None in (*self.before, *self.after)

    def block(self, most: int, unit: int = 1) -> int | None:
        """Return the side of the smallest square blocks of patches, a multiple of `unit`, with
        which a map has at most `most` cells; None if other tokens alone are more."""
        others = len(self.before) + len(self.after)
        for side in range(unit, max(self.rows, self.columns) + unit, unit):
            if others + -(-self.rows // side) * -(-self.columns // side) <= most:
                return side
        return None

    def cells(self, block: int) -> Tensor:
        """Return the cell of each token in a map, (T,): the patches of a block have the same."""
        cells = torch.arange(len(self.tokens))
        patches = cells[self.patches].view(self.rows, self.columns)
        rows, columns = (torch.arange(n) // block * block for n in patches.shape)
        cells[self.patches] = patches[rows][:, columns].flatten()
        return cells.unique(return_inverse=True)[1]

    def cell_names(self, tokens: Sequence[str], block: int) -> list[str]:
        """Return the name of each cell: "patch 2,4 to 3,5" for a block, or that of its token."""
        names: list[str] = []
        cells = self.cells(block)
        for of_cell in cells.argsort(stable=True).split(cells.bincount().tolist()):
            first, last = tokens[of_cell[0]], tokens[of_cell[-1]]
            names.append(first if len(of_cell) == 1 else f"{first} to {last.split()[-1]}")
        return names

    @property
    def places(self) -> Tensor:
        """The row and column of each token, (T, 2); far outside of the image for the others."""
        rows, columns = torch.arange(self.rows), torch.arange(self.columns)
        before, after = (torch.full((len(x), 2), -(10**6)) for x in (self.before, self.after))
        return torch.cat([before, torch.cartesian_prod(rows, columns), after])


class PictureTracker:
    """Tracks the image of the running module: the input of the last convolution that cuts patches.

    It is that of the calls of the first module around the convolution that calls attention, until
    this module returns. Then it is the `_last` one, for a language model whose text has an id in
    place of each patch, or of each square of patches.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.name = ""  # of the convolution
        self._picture: Picture | None = None
        self._last: Picture | None = None
        self._in_text: tuple[Tensor, Picture] | None = None  # for the ids of a text

    def of_call(self, root: Running, Tq: int, Tk: int) -> Picture | None:
        """Return the image whose patches are queries and keys of a call in a run of `root`."""
        picture = self._picture or self._of_text(root)
        return picture if picture and Tq == Tk == len(picture.tokens) else None

    def _of_text(self, root: Running) -> Picture | None:
        ids, config = root.arguments().get("input_ids"), getattr(root.module, "config", None)
        image = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        if not isinstance(ids, Tensor) or len(ids) != 1 or image is None:
            return None
        if self._in_text is None or self._in_text[0] is not ids:
            last = _of_flat_patches(root.arguments(), config) or self._last
            picture = _pooled(last, (ids[0] == image).nonzero().flatten(), ids.shape[1])
            self._in_text = None if picture is None else (ids, picture)
        return self._in_text and self._in_text[1]

    def leave(self, ran: Running, calls: int, args: Sequence[Any], result: Any) -> None:
        """Note that a module returns; `calls` attention calls were made so far."""
        if _cuts_patches(ran.module) and isinstance(result, Tensor) and len(result) == 1:
            self.name = ran.name
            rows, columns = result.shape[-2:]
            self._picture = Picture(self._before(), rows, columns, pixels_of(args[0][0]))
            self._last, self._in_text = self._picture, None
        elif ran.calls < calls and f"{self.name}.".startswith(f"{ran.name}." if ran.name else ""):
            self._picture = None

    def _before(self) -> tuple[str, ...]:
        """Return the names of the tokens that are parameters of modules around the convolution."""
        parents, tokens = self.name.split(".")[:-1], list[str]()
        owners = [self._model.get_submodule(".".join(parents[:n])) for n in range(len(parents) + 1)]
        for token, names in BEFORE_PATCHES.items():
            for x in (getattr(owner, name, None) for owner in owners for name in names):
                if isinstance(x, Tensor):
                    tokens += [token] * (x.shape[-2] if x.dim() > 1 else 1)
        return tuple(tokens)


class _AtPatches(BaseException):
    """Ends a run at the first call on patches."""


class FirstCall(ModelFollower):
    """Follows a run to the first call on patches, and stores its `picture` and `inputs`."""

    picture: Picture | None = None
    inputs: Inputs

    def __init__(self, model: nn.Module, start: Callable[[], object]) -> None:
        super().__init__(model)
        self.running.texts.pictures = self.tracker = PictureTracker(model)
        with contextlib.suppress(_AtPatches), torch.no_grad(), self.followed(attention_only=False):
            start()

    def begin(self, problem: Problem, inputs: Inputs) -> Statistics:
        running = self.running.texts.running
        if running and (picture := self.tracker.of_call(running[0], problem.Tq, problem.Tk)):
            self.picture, self.inputs = picture, inputs
            raise _AtPatches
        return ()

    def receive(self, call: FollowedCall) -> None:
        self.running.texts.calls += 1


def are_in_order(model: nn.Module, start: Callable[[], object]) -> bool:
    """Return whether the patches are tokens row by row, as `Picture` has them.

    Then a change of the last patch of the first row changes this token in what the first call on
    patches receives, and others less than half as much: a norm may be over all patches. This runs
    the model twice to that call, if it cuts patches at all.
    """
    before = FirstCall(model, start) if any(map(_cuts_patches, model.modules())) else None
    if before is None or before.picture is None:
        return True
    cut: Any = model.get_submodule(before.tracker.name)
    (height, width), last = cut.kernel_size, before.picture.columns - 1

    def change(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pixels = args[0].clone()
        pixels[..., :height, last * width : (last + 1) * width] += 1.0
        return pixels, *args[1:]

    with cut.register_forward_pre_hook(change):
        after = FirstCall(model, start)
    pairs = zip(before.inputs[:3], after.inputs[:3], strict=True)
    changes = torch.stack([(a - b).abs().amax((0, 1, 3)).double() for a, b in pairs])  # (3, T)
    of_tokens = (changes / changes.amax(-1, keepdim=True).clamp(min=1e-30)).amax(0)
    changed = of_tokens > of_tokens.max() / 2
    return changed.nonzero().flatten().tolist() == [len(before.picture.before) + last]


def stream_norms(running: Sequence[Running], calls: int, tokens: int) -> Tensor | None:
    """Return the norm of each token's vector in the residual stream as the layer of the current
    call begins, (T,); None if unknown.

    The outermost module that began after the last of `calls` attention calls received the stream,
    if there is a norm between it and attention.
    """
    for ran in running[:-1]:
        if ran.calls == calls and any("Norm" in type(x).__name__ for x in ran.module.modules()):
            for x in ran.arguments().values():
                if isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == (1, tokens):
                    return x[0].detach().double().norm(dim=-1)
    return None


def _cuts_patches(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.padding not in ("valid", (0, 0)):
        return False
    return module.kernel_size == module.stride and min(module.kernel_size) > 1


def _pooled(picture: Picture | None, at: Tensor, tokens: int) -> Picture | None:
    """Return an image in a text of which the tokens `at` are its patches, or squares of them; None
    if they cannot be."""
    count = len(at)
    if picture is None or not count or int(at[-1] - at[0]) + 1 != count:
        return None
    side = math.isqrt(picture.rows * picture.columns // count)
    rows, columns = picture.rows // max(side, 1), picture.columns // max(side, 1)
    is_cut = (rows * side, columns * side) == (picture.rows, picture.columns)
    if not is_cut or rows * columns != count:
        return None
    before, after = (None,) * int(at[0]), (None,) * (tokens - int(at[-1]) - 1)
    return Picture(before, rows, columns, picture.pixels, after)


def _of_flat_patches(arguments: Mapping[str, Any], config: Any) -> Picture | None:
    """Return the image of Qwen2-VL and later models, which receive its patches as rows of numbers,
    square by square of those that become one token; None for another model, or several images."""
    grid, rows = arguments.get("image_grid_thw"), arguments.get("pixel_values")
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
    if merge is None or not (isinstance(grid, Tensor) and isinstance(rows, Tensor)):
        return None
    if len(grid) != 1 or int(grid[0, 0]) != 1:
        return None
    down, across, side = *grid[0, 1:].tolist(), config.vision_config.patch_size
    if len(rows) != down * across or rows.shape[-1] % (3 * side * side):
        return None
    cut = rows.view(down // merge, across // merge, merge, merge, 3, -1, side, side)[..., 0, :, :]
    image = cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, down * side, across * side)
    return Picture((), down, across, pixels_of(image))


def pixels_of(image: Tensor, largest: int = LARGEST) -> Tensor:
    """Return an image (C, height, width) as `Picture.pixels`, of at most `largest` pixels on a
    side; grey unless it has three colours."""
    step = -(-max(image.shape[-2:]) // largest)
    image = image[:, ::step, ::step].detach().float().cpu()
    image = image if len(image) == 3 else image.mean(0, keepdim=True)
    least, most = image.amin((-2, -1), keepdim=True), image.amax((-2, -1), keepdim=True)
    shades = (image - least) / (most - least).clamp(min=1e-9) * 255
    return shades.expand(3, -1, -1).permute(1, 2, 0).round().byte().contiguous()
