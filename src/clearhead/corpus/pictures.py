"""Read pictures with a vision model: a picture is a text whose tokens are its patches, row by row,
after the tokens of the model such as [CLS].

All pictures of a survey have one grid, so that a token id is a place on it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Size, Tensor

from ..core.errors import BadValue, is_iterable
from ..hf import ImageCheckpoint
from ..hf.image_checkpoint import SUFFIXES
from ..models.follow.picture import FirstCall, Picture, are_in_order
from .texts import Sources, Text, read_texts


@dataclass(frozen=True, eq=False)
class Pictures:
    """How a vision model reads pictures.

    Attributes:
        model: the model and its image processor.
        grid: its tokens, of a picture that is a gradient.
        shape: the shape of its input, (1, channels, height, width).
    """

    model: ImageCheckpoint
    grid: Picture
    shape: Size

    def pixels(self, file: Path) -> Tensor:
        """Read a picture as the model receives it, of `shape`.

        Raises `BadValue` for a file that is not an image, and for one of another size.
        """
        pixels: Tensor = self.model.tokens_and_inputs(file)[1]["pixel_values"]
        if pixels.shape != self.shape:
            size, other = (" x ".join(map(str, x[-2:])) for x in (pixels.shape, self.shape))
            gave = f"The image processor makes {size} pixels of {str(file)!r}."
            rule = f"all pictures of a survey have one grid of patches; a square has {other} here."
            hint = "set do_center_crop or a fixed size in preprocessor_config.json."
            raise BadValue(gave, rule, hint)
        return pixels


def open_pictures(model: ImageCheckpoint) -> Pictures:
    """Return how a model reads pictures, from a run on a gradient up to its first attention call.

    Raises `BadValue` for a model whose tokens are not the patches, row by row.
    """
    from PIL import Image

    _, inputs = model.tokens_and_inputs(Image.radial_gradient("L"))
    start = partial(model.run, inputs)
    grid = FirstCall(model.module, start).picture
    if grid is None or not are_in_order(model.module, start):
        gave = f"The tokens of {model.name} are not the patches of a picture, row by row."
        rule = "a survey of pictures has one row of tokens for each; windows, stages, and patches "
        rule += "that are shuffled or left out have no such grid."
        hint = "use a model such as ViT or DINOv2, or watch(model) for the weights of this one."
        raise BadValue(gave, rule, hint)
    return Pictures(model, grid, inputs["pixel_values"].shape)


def read_pictures(sources: Sources, tokens: int) -> Iterator[Text]:
    """Read pictures of so many tokens, one after the other: paths of files and folders.

    A folder is read as one of texts; a file whose name does not end as that of an image is left
    out, with this reason. Raises the errors of `read_texts`.
    """
    several: Any = sources if is_iterable(sources) and not isinstance(sources, str) else [sources]
    paths = (Path(x) if isinstance(x, str) else x for x in several)
    return read_texts(paths, partial(_picture, range(tokens)))


def _picture(ids: Sequence[int], file: Path, name: str) -> Iterator[Text]:
    if file.suffix.lower() not in SUFFIXES:
        yield Text(name, None, f"it ends in none of {', '.join(SUFFIXES)}")
        return
    digest = ""
    with suppress(OSError):  # `Pictures.pixels` raises it, as for a damaged file
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    yield Text(name, None, ids=ids, file=file, digest=digest)
