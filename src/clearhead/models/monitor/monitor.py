"""Watch a training: `Monitor`, which logs numbers of each head at every few steps."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import BadType, BadValue, as_count, did_you_mean
from ...core.functional.ambient import FollowedCall
from ...core.problem.problem import Inputs, Problem
from ...core.stats import Statistic
from ...core.torch_state import compiled_parts
from ..follow.layers import check_layers, checked_list, must_be_module
from ..inspect.recording import Call
from ..inspect.watcher import Watcher
from .adapters import lightning_callback, tensorboard, trainer_callback
from .alarms import Alarm, Alarms
from .history import History, parquet
from .metrics import METRICS, SUMS, HeadSums, statistics_for, sums_of_call
from .query_key import QueryKey, query_key

_GRADIENTS = ("grad_q", "grad_k")


class LayerState(NamedTuple):
    """What is known of a layer after a call: its parameters, and why `qk_clip` cannot use them."""

    name: str
    rows: QueryKey | None
    H: int
    obstacle: str


class Monitor(AbstractContextManager["Monitor"]):
    """Logs numbers of each attention head while a model trains.

    >>> with ch.monitor(model, every=50, log=print) as monitor:  # doctest: +SKIP
    ...     for batch in data:
    ...         loss(model, batch).backward()
    ...         optimizer.step()
    ...         monitor.step()
    ...         optimizer.zero_grad()

    Steps are numbered from `start`. A step whose number is a multiple of `every` is logged: `log`
    gets one flat dict, and its number. The dict has ``attention/L12/H3/max`` for head 3 of layer
    12, and so on. These are the metrics, over all queries of the step's forward passes, without
    padding and fully masked queries:

    - ``max``: the largest logit, after scale, soft cap, bias and mask.
    - ``entropy``: the mean entropy of the weights, in nats.
    - ``entropy_fraction``: the mean of entropy / log n, for queries that may look at n > 1 keys.
    - ``first``, ``self``: the mean weight on the first token of the text, and on the query itself.
    - ``peaked``: the fraction of queries whose largest weight exceeds 0.99.
    - ``output``: the root mean square over queries of the norm of the head's output before the
      output projection, as a multiple of the same for all heads of its layer.
    - ``grad_q``, ``grad_k``: the norms of the gradients of the head's rows of W_Q, and of the rows
      of W_K of the key head that it reads. They are those of `step`, clipped if gradients are, so
      call it after the optimizer and before ``zero_grad``. A layer whose W_Q and W_K are not
      found, or get no gradient, such as one with LoRA around them, has none.

    A forward pass counts if the model is in training mode and autograd records it. So evaluation
    in between does not count, and all micro-batches of a step do. A layer that a checkpoint
    recomputes counts once. On other steps nothing of the model is hooked. On a logged step, a model
    that torch.compile compiled runs eagerly.

    With DistributedDataParallel or FSDP2, the numbers are those of the batches of all ranks: all
    ranks call `step`, which communicates once. Every rank logs the same.

    Args:
        every: log each step whose number is a multiple of this.
        stats: the metrics to log.
        log: is called with a dict and the number of the step: ``ch.monitor.parquet(folder)``,
            ``ch.monitor.tensorboard(writer)``, or ``wandb.log``. None logs nothing; `step` returns
            the dict.
        layers: only these layers: numbers, or patterns for module names. None means all.
        on_alarm: is called with each `Alarm`. If it returns True, `stopped` becomes True, and the
            callbacks of Trainer and Lightning stop the run. None warns.
        group: the ranks whose batches belong to the step: a process group. None means those of
            DistributedDataParallel or FSDP2, or this process if no group is initialized.
        start: the number of the first step; of a resumed run, that at which it goes on.

    Raises:
        BadValue, BadType: unknown metrics or layers, ranks that are not known, and at a logged
            step a model that ran without an attention call, or whose gradients are gone.
    """

    TrainerCallback = classmethod(trainer_callback)
    LightningCallback = classmethod(lightning_callback)
    tensorboard = staticmethod(tensorboard)
    parquet = staticmethod(parquet)
    read = History.read

    def __init__(
        self, model: nn.Module, *, every: int = 50, stats: Sequence[str] = METRICS,
        log: Callable[[dict[str, float], int], object] | None = None,
        layers: Sequence[int | str] | None = None,
        on_alarm: Callable[[Alarm], object] | None = None, group: "dist.ProcessGroup | None" = None,
        start: int = 0,
    ) -> None:  # fmt: skip
        must_be_module("monitor", model, "monitor watches the modules of a model.")
        self.model, self.log, self.on_alarm = model, log, on_alarm
        self.every = as_count(
            "every", every, "every is a number of steps.", "pass every=50.", least=1
        )
        self.stats = _checked(stats)
        self.group = _group_of(model) if group is None else group
        self.next_step, self.stopped = start, False
        check_layers(checked_list("layers", layers, patterns=True), model)
        self._watcher = _StepWatcher(
            model, self._keep, statistics_for(self.stats), layers, outputs="output" in self.stats
        )
        self._sums: dict[int, HeadSums] = {}
        self.layers: dict[int, LayerState] = {}
        self.largest: dict[int, list[float]] = {}  # the largest logits of the last step, if logged
        self._heads: dict[int, int] | None = None  # of the layers that the ranks agreed on
        self._alarms = Alarms()
        self._open = ExitStack()
        MONITORS[id(model)] = self  # for `qk_clip`
        self._begin()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks. No further step is logged."""
        self._open.close()

    @property
    def is_due(self) -> bool:
        """Whether the step that runs now is logged."""
        return self.next_step % self.every == 0

    def step(self) -> dict[str, float] | None:
        """End a step of the training. Returns the numbers of a logged step, and None for others."""
        number, due = self.next_step, self.is_due
        self.next_step += 1
        self.largest = {}
        row = None
        if due:
            self._open.close()
            if not self._sums:
                self._watcher.check_recorded()
                text = "a pass counts if the model is in training mode and autograd records it"
                text = f"monitor counted no forward pass at step {number}: {text}"
                warnings.warn(text, stacklevel=2)
            row = self._logged(number)
        self._begin()
        return row

    def _begin(self) -> None:
        self._sums = {}
        if self.is_due:
            if compiled_parts(self.model):
                self._open.enter_context(torch.compiler.set_stance("force_eager"))
            self._open.enter_context(self._watcher.followed(bool(self.layers)))

    @torch.no_grad()
    def _keep(self, call: Call, followed: FollowedCall) -> None:
        sums = sums_of_call(call, followed)
        if (before := self._sums.get(call.layer)) is not None:
            sums = before.merge(sums)
        self._sums[call.layer] = sums
        if call.layer not in self.layers:
            self.layers[call.layer] = self._layer(call, followed)
        self._watcher.projected.clear()

    def _layer(self, call: Call, followed: FollowedCall) -> LayerState:
        p, received = followed.problem, followed.received
        rows = query_key(self.model.get_submodule(call.module), p.H, p.G, p.D, p.Dv)
        obstacle = ""
        if rows is None:
            obstacle = "its W_Q and W_K are not found, or are not plain matrices"
        elif p.softcap is not None or p.bias is not None:
            obstacle = "its logits have a soft cap or a bias"
        elif not all(
            part.computes(x, self._watcher.projected.get(part.module))
            for part, x in ((rows.query, received.q), (rows.key, received.k))
        ):
            obstacle = "its queries or keys are more than their matrices and a rotation"
        return LayerState(call.module, rows, p.H, obstacle)

    def _logged(self, number: int) -> dict[str, float]:
        own = {layer: self._with_gradients(layer, x) for layer, x in self._sums.items()}
        merged = sorted(self._merged(own).items())
        layers = {layer: sums.numbers(self._known(layer)) for layer, sums in merged}
        self.largest = {layer: x["max"] for layer, x in layers.items() if "max" in x}
        row = {
            f"attention/L{layer}/H{head}/{name}": values[head]
            for layer, numbers in layers.items()
            for head in range(len(next(iter(numbers.values()), ())))
            for name, values in numbers.items()
        }
        if self.log is not None:
            self.log(row, number)
        for alarm in self._alarms.check(number, layers):
            if self.on_alarm is not None:
                self.stopped |= self.on_alarm(alarm) is True
            else:
                warnings.warn(f"step {number}: {alarm.sentence}", stacklevel=3)
        return row

    def _known(self, layer: int) -> tuple[str, ...]:
        """Return the metrics of a layer: all, or those without gradients."""
        rows = self.layers[layer].rows
        has = rows is not None and rows.query.weight.requires_grad
        return tuple(name for name in self.stats if has or name not in _GRADIENTS)

    def _with_gradients(self, layer: int, sums: HeadSums) -> HeadSums:
        name, rows, H, _ = self.layers[layer]
        columns = sums.sums.clone()
        for metric in {*self._known(layer)} & {*_GRADIENTS}:
            assert rows is not None
            part = rows.query if metric == "grad_q" else rows.key
            of_rows = part.squared_gradient()
            if of_rows is None:
                gave = f"The weights of {name} have no gradient at step {self.next_step - 1}."
                rule = "grad_q and grad_k are norms of the gradients of the step."
                hint = "call monitor.step() before zero_grad, or leave them out of stats."
                raise BadValue(gave, rule, hint)
            copies = 1 if hasattr(part.weight, "device_mesh") else self._world
            columns[:, SUMS.index(metric)] = of_rows.repeat_interleave(H // len(of_rows)) / copies
        return sums._replace(sums=columns)

    @property
    def _world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def _merged(self, sums: dict[int, HeadSums]) -> dict[int, HeadSums]:
        """Return the sums over all ranks, by one collective operation.

        At the first logged step, another one agrees on the layers.
        """
        if self.group is None or self._world == 1:
            return sums
        if self._heads is None:
            counts: list[Any] = [None] * self._world
            dist.all_gather_object(counts, {i: x.H for i, x in self.layers.items()}, self.group)
            self._heads = dict(sorted((k, v) for x in counts for k, v in x.items()))
        parts = [sums.get(layer) or HeadSums.empty(H) for layer, H in self._heads.items()]
        own = torch.cat([torch.cat([x.largest[:, None], x.sums], 1) for x in parts])
        has_others = self.layers.keys() != self._heads.keys()  # in the last row, for every rank
        own = nn.functional.pad(own, (0, 0, 0, 1), value=float(has_others))
        own = own.to(next(self.model.parameters()).device)
        gathered = [torch.empty_like(own) for _ in range(self._world)]
        dist.all_gather(gathered, own, self.group)
        of_ranks, heads = torch.stack(gathered).cpu(), [*self._heads.values()]
        if bool(of_ranks[:, -1].any()):
            gave = f"At step {self.next_step - 1}, a layer ran on some ranks or for the first time."
            rule = "over ranks, the layers are those of the first logged step, on every rank."
            raise BadValue(gave, rule, "pass layers= with the layers that always run.")
        largest, total = of_ranks[:, :-1, 0].amax(0), of_ranks[:, :-1, 1:].sum(0)
        merged = zip(self._heads, largest.split(heads), total.split(heads), strict=True)
        return {layer: HeadSums(*x) for layer, *x in merged}


# By the id of the model, which is valid as long as its monitor, which has the model.
MONITORS: "weakref.WeakValueDictionary[int, Monitor]" = weakref.WeakValueDictionary()


class _StepWatcher(Watcher):
    """Follows the forward passes that count, and remembers what linear modules returned."""

    gradients = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.projected: dict[nn.Module, Tensor] = {}

    def leave(self, module: nn.Module, args: Sequence[Any], result: Any) -> Any:
        if module is self.model:
            self.projected.clear()
        elif isinstance(result, Tensor) and getattr(module, "weight", None) is not None:
            self.projected[module] = result.detach()
        return super().leave(module, args, result)

    def begin(self, problem: Problem, inputs: Inputs) -> tuple[Statistic, ...]:
        self._begun = None
        if not (self.grad_enabled and self.model.training):
            return ()
        return super().begin(problem, inputs)


def _checked(stats: object) -> tuple[str, ...]:
    rule = f"stats is a list of metrics: {', '.join(METRICS)}."
    if isinstance(stats, str) or not isinstance(stats, Sequence) or not stats:
        raise BadType(f"stats is {stats!r}.", rule, 'pass for example stats=["max", "entropy"].')
    if unknown := [x for x in stats if x not in METRICS]:
        hint = did_you_mean(unknown[0], METRICS) or "use some of these."
        raise BadValue(f"stats has {unknown[0]!r}.", rule, hint)
    return tuple(name for name in METRICS if name in stats)


def _group_of(model: nn.Module) -> "dist.ProcessGroup | None":
    """Return the ranks whose batches belong to a step of the model."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
        return group
    meshes: Mapping[Any, None] = dict.fromkeys(
        x.device_mesh for x in model.parameters() if hasattr(x, "device_mesh")
    )
    if len(meshes) == 1 and next(iter(meshes)).size() == dist.get_world_size():
        return dist.group.WORLD
    gave = f"monitor got a {type(model).__name__}, and torch has {dist.get_world_size()} ranks."
    rule = "whose batches a step has is known for DistributedDataParallel and FSDP2 alone."
    raise BadValue(gave, rule, "pass the wrapped model, or group=torch.distributed.group.WORLD.")
