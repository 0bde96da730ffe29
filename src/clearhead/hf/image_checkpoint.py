"""Read images with a checkpoint that has an image processor and no tokenizer."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.errors import BadValue, must_be_of, needs, why_failed
from .checkpoint import Checkpoint

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class ImageCheckpoint(Checkpoint):
    """A vision model and its image processor from a folder on disk.

    As `Checkpoint`, also in what it raises; `processor` is that of transformers, in place of the
    tokenizer.
    """

    def _load_reader(self, library: Any, source: dict[str, Any]) -> None:
        self.processor = library.AutoImageProcessor.from_pretrained(self.folder, **source)

    def _check_vocabulary(self) -> None:
        """Accept a model without words."""

    @property
    def words(self) -> tuple[str, ...]:
        """No words."""
        return ()

    def tokens_and_inputs(self, text: Any) -> tuple[list[str], dict[str, Tensor]]:
        """Return no tokens, and the inputs of the model for an image of Pillow, or a path to one.

        Raises `BadValue` for a file that is not an image, and `BadType` for anything else.
        """
        with needs("hf", "images are read by Pillow."):
            from PIL import Image, ImageOps
        rule = "its input is an image: the path of a file, or an image of Pillow."
        hint = "pass for example Path('photo.jpg'); for tensors, use report(model.model, inputs)."
        must_be_of((str, Path, Image.Image), self.name, text, rule, hint)
        try:
            with nullcontext(text) if isinstance(text, Image.Image) else Image.open(text) as image:
                upright = ImageOps.exif_transpose(image).convert("RGB")
                return [], dict(self.processor(upright, return_tensors="pt"))
        except Exception as error:  # the reader of a damaged file may raise anything
            gave = f"The image {str(text)!r} cannot be read: {why_failed(error)}."
            hint = "check the path, and open the file in another program."
            raise BadValue(gave, "an image is a file such as JPEG or PNG.", hint) from error

    def annotate(self, report: Any) -> Any:
        """Return the report, to which nothing is added."""
        return report
