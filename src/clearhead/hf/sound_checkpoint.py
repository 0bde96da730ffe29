"""Read speech with a checkpoint of Whisper, which has a feature extractor and a tokenizer."""

import wave
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import BadValue, must_be_of, why_failed
from .checkpoint import Checkpoint
from .register import transformers
from .token_text import TokenTexts

SOUNDS = (".wav",)


class SoundCheckpoint(Checkpoint):
    """A Whisper model, its feature extractor and its tokenizer, from a folder on disk.

    As `Checkpoint`, also in what it raises. It reads a sound and writes its words, which are the
    text of the decoder; the encoder's text are frames of the sound, named by their seconds.
    """

    has_decoder = False  # that is left out

    def _load_reader(self, library: Any, source: dict[str, Any]) -> None:
        super()._load_reader(library, source)
        self.extractor = library.AutoFeatureExtractor.from_pretrained(self.folder, **source)

    @property
    def module(self) -> nn.Module:
        """The model without its last linear layer."""
        module = self.model.model
        assert isinstance(module, nn.Module)
        return module

    @property
    def frame(self) -> float:
        """The seconds of one frame of the encoder."""
        return 2 * self.extractor.hop_length / self.extractor.sampling_rate

    def samples(self, sound: str | Path) -> Any:
        """Return the samples of a WAV file, from -1 to 1. Raises `BadValue` for another file."""
        rate, longest = self.extractor.sampling_rate, self.extractor.chunk_length
        must_be_of((str, Path), self.name, sound, "its input is a sound.", "pass Path('x.wav').")
        rule = f"a sound is a WAV file of 16 bits, one channel, {rate} Hz, at most {longest} s."
        hint = f"convert it: ffmpeg -i FILE -ac 1 -ar {rate} -t {longest} -sample_fmt s16 new.wav"
        try:
            with wave.open(str(sound)) as file:
                form = file.getnchannels(), 8 * file.getsampwidth(), file.getframerate()
                count, data = file.getnframes(), file.readframes(file.getnframes())
        except (OSError, EOFError, wave.Error) as error:
            gave = f"The sound {str(sound)!r} cannot be read: {why_failed(error)}."
            raise BadValue(gave, rule, hint) from error
        if form != (1, 16, rate) or not 0 < count <= longest * rate or len(data) != 2 * count:
            has = "{} channels, {} bits, {} Hz".format(*form)
            raise BadValue(f"{str(sound)!r} has {has}, {count / form[2]:.2f} s.", rule, hint)
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768

    def tokens_and_inputs(self, text: Any) -> tuple[list[str], dict[str, Tensor]]:
        """Return the second at which each frame begins, and the inputs of the model for the path of
        a sound: its features, and the most probable words, each the largest logit."""
        options = {"sampling_rate": self.extractor.sampling_rate, "return_tensors": "pt"}
        features = self.extractor(self.samples(text), **options)["input_features"]
        written, settings = self.model, self.model.generation_config
        prompt = [settings.decoder_start_token_id]
        with torch.no_grad():
            if getattr(settings, "is_multilingual", False):
                prompt += [
                    int(written.detect_language(features)),
                    settings.task_to_id["transcribe"],
                ]
            prompt.append(self.tokenizer.convert_tokens_to_ids("<|notimestamps|>"))
            # Whisper's own `generate` returns the words without the prompt.
            generate = partial(transformers().GenerationMixin.generate, written, features)
            longest = written.config.max_target_positions
            begin = torch.tensor([prompt])
            ids = generate(
                decoder_input_ids=begin, do_sample=False, num_beams=1, max_length=longest
            )
        times = [f"{i * self.frame:.2f} s" for i in range(features.shape[-1] // 2)]
        return times, {"input_features": features, "decoder_input_ids": ids}

    def decoder_tokens(self, inputs: dict[str, Tensor]) -> list[str]:
        """Return the words of the inputs, each a `Token`."""
        ids = inputs["decoder_input_ids"][0].tolist()
        return [*TokenTexts(self.tokenizer).tokens(None, ids, None)]

    def annotate(self, report: Any) -> Any:
        """Return the report, to which nothing is added."""
        return report
