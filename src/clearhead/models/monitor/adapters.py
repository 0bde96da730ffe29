"""Run a monitor inside transformers' Trainer and Lightning, and log to TensorBoard."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...core.errors import Missing, needs


def trainer_callback(monitor_class: Any, **options: Any) -> Any:
    """Return a callback for transformers' Trainer, which monitors its model.

    >>> callback = ch.monitor.TrainerCallback(every=50, log=write)  # doctest: +SKIP
    >>> Trainer(model, args, callbacks=[callback])  # doctest: +SKIP

    The options are those of `monitor`, without model, group and start. A step is an optimizer step,
    numbered as ``global_step``, so a resumed run goes on. Only rank 0 logs. `callback.monitor` is
    the monitor of the run.

    Raises `Missing` without transformers.
    """
    with needs("hf", "TrainerCallback is a class of transformers."):
        from transformers import TrainerCallback

    class MonitorCallback(TrainerCallback):
        monitor: Any = None

        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
        ) -> None:
            chosen = _of_rank(state.is_world_process_zero, options)
            self.monitor = monitor_class(model, start=state.global_step, **chosen)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.monitor.step()
            control.should_training_stop |= self.monitor.stopped

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.monitor.close()

    return MonitorCallback()


def lightning_callback(monitor_class: Any, **options: Any) -> Any:
    """Return a callback for Lightning's Trainer, which monitors its module.

    >>> callback = ch.monitor.LightningCallback(every=50, log=write)  # doctest: +SKIP
    >>> Trainer(callbacks=[callback])  # doctest: +SKIP

    The options are those of `monitor`, without model, group and start. A step is an optimizer step,
    numbered as ``global_step``. Only rank 0 logs.

    Raises `Missing` without Lightning.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        rule = "LightningCallback is a callback of Lightning."
        raise Missing("lightning is not installed.", rule, "pip install lightning") from error

    class MonitorCallback(Callback):
        monitor: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            chosen = _of_rank(trainer.is_global_zero, options)
            self.monitor = monitor_class(module, start=trainer.global_step, **chosen)

        def on_train_batch_end(self, trainer: Any, module: Any, *batch: Any) -> None:
            # Gradients are set to zero in the next step, after its forward pass.
            if trainer.global_step > self.monitor.next_step:
                self.monitor.step()
                trainer.should_stop |= self.monitor.stopped

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.monitor.close()

    return MonitorCallback()


def _of_rank(is_first: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a rank: one that is not the first does not log."""
    chosen = options if is_first else options | {"log": None}
    in_group = dist.is_available() and dist.is_initialized()
    return chosen | {"group": dist.group.WORLD} if in_group else chosen


def tensorboard(writer: Any) -> Callable[[dict[str, float], int], object]:
    """Return a `log` for `monitor` that writes to a `torch.utils.tensorboard.SummaryWriter`."""
    return lambda numbers, step: [writer.add_scalar(x, numbers[x], step) for x in numbers]
