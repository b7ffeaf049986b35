"""Sequence parallelism in the Trainer of transformers, and in training loops with Accelerate.

    torchrun --nproc-per-node 8 train.py

    from ulysses.trainer import Trainer

    trainer = Trainer(model=model, args=args, train_dataset=data, sequence_parallel_size=4)
    trainer.train()

P = sequence_parallel_size consecutive ranks are a sequence group. They load the same batches, and
each of them computes on its shard of every sequence. Groups are replicas: they load different
batches. `per_device_train_batch_size` is the number of sequences of a group, and one step has
per_device_train_batch_size * gradient_accumulation_steps * groups sequences.

The loss and its gradient are means over all valid tokens of a step: of all ranks, groups and
micro-batches. This is what the Trainer does with num_items_in_batch. DistributedDataParallel
reduces the gradients over all ranks.

Another Trainer becomes sequence parallel with the class `SequenceParallel` before it::

    class MyTrainer(SequenceParallel, SFTTrainer): ...

The module imports transformers, so `import ulysses` does not import it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from . import forwards
from ._versions import check_accelerate, check_versions
from .data import local_batch, shard, to_owners, with_shifted_labels
from .errors import InvalidArgument, Unsupported
from .parallel_state import ParallelState, check_size, parallel_state
from .transformers import _register, _tables

EVALUATION = ("sharded", "whole")
_names = (f"ulysses_trainer_{i}" for i in itertools.count())


class SequenceParallel:
    """Makes a subclass of transformers.Trainer sequence parallel. See the module.

    Methods of the Trainer that are overridden: call_model_init, train, get_train_dataloader,
    get_batch_samples, compute_loss, prediction_step, get_total_train_batch_size,
    floating_point_ops.

    Args:
        args, kwargs: the arguments of the Trainer
        sequence_parallel_size (int, optional): consecutive ranks of a sequence group, a divisor of
            the number of ranks. 1 = the Trainer as it is. Default: None, all ranks
        evaluation (str): how `evaluate` and `predict` run. In both modes the ranks load different
            batches, as without sequence parallelism, and metrics have whole sequences. "sharded":
            the ranks of a group compute the batches of all its ranks, one after the other, each
            rank on its shard. "whole": each rank computes the whole sequences of its batch with
            the model's former attention, without communication. Default: "sharded"

    Attributes:
        sequence_parallel (ParallelState): the groups; None if sequence_parallel_size is 1

    Raises:
        InvalidArgument: an argument is wrong, or differs between ranks
        Unsupported: an option of the Trainer does not work on several ranks of a sequence; the
            message names it

    After training, `model.set_attn_implementation("sdpa")` makes the model independent of the
    ranks again, for example for generation.
    """

    # What the class that follows in the method resolution order, the Trainer, has.
    args: Any
    model: Any
    accelerator: Any
    sequence_parallel: ParallelState | None = None
    _sharded_evaluation: bool

    def __init__(
        self,
        *args: Any,
        sequence_parallel_size: int | None = None,
        evaluation: str = "sharded",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._sharded_evaluation = evaluation == "sharded"
        operation = f"ulysses: {type(self).__name__}"
        check_versions(operation, self.accelerator)
        size = self.args.world_size if sequence_parallel_size is None else sequence_parallel_size
        if evaluation not in EVALUATION:
            raise InvalidArgument(
                f"{operation}: evaluation {evaluation!r}; give one of "
                f"{', '.join(map(repr, EVALUATION))}"
            )
        if size < 1:
            raise InvalidArgument(f"{operation}: sequence_parallel_size is {size}; give 1 or more")
        if size == 1:
            return
        check_size(operation, size)
        state = parallel_state(size)

        def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
            _check_options(operation, self)
            return {"sequence_parallel_size": size, "evaluation": evaluation}, (), None

        state.context.agree(operation, prepare)
        _use_attention(self.model, state, self._sharded_evaluation)
        if self.accelerator.dataloader_config.dispatch_batches is None:
            self.accelerator.dataloader_config.dispatch_batches = False  # each rank loads its data
        self.sequence_parallel = state

    @property
    def _size(self) -> int:
        return 1 if self.sequence_parallel is None else self.sequence_parallel.context.size

    def call_model_init(self, trial: Any = None) -> Any:
        """Returns a new model of `model_init`, which calls this package. Not collective."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        if self.sequence_parallel is not None:  # the constructor prepares the first model
            _use_attention(model, self.sequence_parallel, self._sharded_evaluation)
        return model

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does. Collective."""
        if self.sequence_parallel is not None:
            # The Trainer marks a model that was evaluated before training as prepared, and then
            # does not wrap it in DistributedDataParallel: gradients would not be reduced.
            vars(self.model).pop("_is_accelerate_prepared", None)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Returns the data loader of this rank's group: the same on all its ranks."""
        with same_data(self.accelerator, self.sequence_parallel):
            loader = super().get_train_dataloader()  # type: ignore[misc]
        if self._size > 1 and getattr(loader, "rng_types", None) is not None:
            # Samplers without a generator, such as the one of group_by_length, draw from PyTorch's
            # default generator. Dropout has advanced it differently on each rank.
            loader.rng_types = [*loader.rng_types, "torch"]
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Returns the batches of a step, and the number of their valid tokens on all groups."""
        if self._size == 1:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        shifted = map(with_shifted_labels, epoch_iterator)
        batches, items = super().get_batch_samples(shifted, num_batches, device)  # type: ignore[misc]
        # Each rank of a group has counted the tokens of the group. Without
        # average_tokens_across_devices, only this group's are counted, and the division makes up
        # for the mean of gradients over all ranks.
        # With no label at all, the loss is 0 and not 0/0.
        return batches, None if items is None else items.clamp(min=1) / self._size

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Computes this rank's share of the loss in training, from whole sequences. Collective."""
        if self.sequence_parallel is not None and model.training:
            context = self.sequence_parallel.context
            if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
                raise Unsupported(
                    f"ulysses: {type(self).__name__}: a {type(model).__name__} in training is not "
                    "wrapped in DistributedDataParallel, which reduces its gradients; train with "
                    "Trainer.train"
                )
            self._check_attention(self.accelerator.unwrap_model(model))
            inputs = _with_labels(local_batch(inputs, context=context))
            if num_items_in_batch is None or "labels" not in inputs:
                raise Unsupported(
                    f"ulysses: {type(self).__name__}: a batch with the keys {sorted(inputs)} has "
                    "no labels, or the number of its labels is not known; give labels [B, S] for "
                    "the loss of a causal language model"
                )
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Computes loss and logits of this rank's batch. Collective."""
        if self.sequence_parallel is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        self._check_attention(self.accelerator.unwrap_model(model))
        inputs = self._without_repeats(inputs)
        if self._sharded_evaluation:
            labels = inputs.get("labels")
            loss, logits = self._predict(model, inputs, prediction_loss_only)
            labels = None if labels is None else labels.to(self.args.device)
            out = loss, *((None, None) if prediction_loss_only else (logits, labels))
        else:
            out = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        loss, *others = out
        if loss is not None and self.args.average_tokens_across_devices:
            # A rank's loss is (ranks * its sum) / (tokens of all ranks). Only the mean over the
            # ranks is a loss, and in the last batch the Trainer drops some ranks' losses.
            loss = self.accelerator.gather(loss).mean()
        return loss, *others

    def _check_attention(self, model: Any) -> None:
        """Raises InvalidArgument if a model's attention is no longer that of this Trainer."""
        name = model.config.get_text_config()._attn_implementation
        found = forwards.registered.get(name)
        assert self.sequence_parallel is not None
        if (
            found is None
            or found.context is not self.sequence_parallel.context
            or found.disable_in_eval is self._sharded_evaluation
        ):
            raise InvalidArgument(
                f"ulysses: {type(self).__name__}: the attention of the model has been set to "
                f"{name!r} after this Trainer was made; make another Trainer with this model"
            )

    def _without_repeats(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch of evaluation without the labels of repeated sequences.

        Accelerate fills the last batch of each rank with sequences of the first batches, and the
        Trainer drops the results of these sequences.
        """
        state, rows = self.accelerator.gradient_state, self.args.eval_batch_size
        labels = inputs.get("labels")
        if labels is None or not state.end_of_dataloader or state.remainder < 1:
            return inputs
        if len(labels) != rows:  # a collator has joined sequences
            return inputs
        first = max(0, state.remainder - self.accelerator.process_index * rows)
        labels = labels.clone()
        labels[first:] = -100
        return {**inputs, "labels": labels}

    def _predict(self, model: Any, inputs: dict[str, Any], loss_only: bool) -> tuple[Any, Any]:
        """Returns (loss, logits) of this rank's batch; None for what there is not. Collective."""
        assert self.sequence_parallel is not None
        context, device = self.sequence_parallel.context, self.args.device
        logits, lengths, sums = [], [], torch.zeros(context.size, dtype=torch.float64)
        labelled = False
        for micro_batch in shard(inputs, context):
            lengths.append(micro_batch.sequences.seq)
            given = {
                k: x.to(device) if torch.is_tensor(x) else x
                for k, x in _with_labels(micro_batch).items()
            }
            labelled = labelled or "labels" in given
            with torch.no_grad(), self.compute_loss_context_manager():  # type: ignore[attr-defined]
                items = {"num_items_in_batch": 1} if "labels" in given else {}
                found = model(**given, **items)
            if "labels" in given:
                sums[micro_batch.owner] = float(found.loss)
            if not loss_only:
                logits.append(found.logits.detach())
        whole = None if loss_only else to_owners(logits, lengths, context)
        return self._mean_of(sums, inputs) if labelled else None, whole

    def _mean_of(self, sums: Any, inputs: dict[str, Any]) -> Any:
        """Returns the loss of this rank's batch, as the Trainer scales it. Collective.

        Args:
            sums: [P], this rank's sum of losses in each micro-batch
            inputs: this rank's batch
        """
        assert self.sequence_parallel is not None
        context, device = self.sequence_parallel.context, self.args.device
        whole = torch.empty(context.size, context.size, dtype=torch.float64)
        context.communicator.allgather(_bytes_of(sums), _bytes_of(whole))
        loss = whole.sum(0)[context.rank].float().to(device)
        # The Trainer counts as in training, because versions before 5.10 count the first label of a
        # sequence, which no token predicts. With average_tokens_across_devices, the number is that
        # of all ranks.
        batch = with_shifted_labels(inputs)
        batch.setdefault("labels", batch.get("shift_labels"))
        items = self._get_num_items_in_batch([batch], device).clamp(min=1)  # type: ignore[attr-defined]
        return (
            loss / items * (self.args.world_size if self.args.average_tokens_across_devices else 1)
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the number of sequences of a step, over all groups and micro-batches."""
        return super().get_total_train_batch_size(args) // self._size  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns this rank's share of the floating point operations of a batch."""
        return super().floating_point_ops(inputs) // self._size  # type: ignore[misc]


class Trainer(SequenceParallel, transformers.Trainer):
    """transformers.Trainer with sequence parallelism. See `SequenceParallel`.

    Example::

        >>> trainer = Trainer(model=model, args=args, train_dataset=data, sequence_parallel_size=4)
        >>> trainer.train()
    """


@contextlib.contextmanager
def same_data(accelerator: Any, state: ParallelState | None) -> Iterator[None]:
    """Data loaders that are prepared inside load the same batches on all ranks of a group.

    Collective over all ranks, the first time.

    Accelerate gives the same batches to all ranks of the axis "cp" of its device mesh. The mesh is
    set while a loader is prepared, and not for models.

    Args:
        accelerator: the accelerate.Accelerator
        state: the groups; None = each rank loads its own batches

    Example, of a training loop with Accelerate::

        >>> state = ulysses.sequence_groups(4)
        >>> ulysses.register_transformers(context=state.context)
        >>> with same_data(accelerator, state):
        ...     loader = accelerator.prepare(loader)
        >>> for batch in loader:
        ...     x = ulysses.local_batch(batch, context=state.context)
        ...     y = x.pop("shift_labels")
        ...     mean = model(**x, labels=y, shift_labels=y).loss
        ...     loss = ulysses.reduce_sequence_parallel_loss(
        ...         mean, (y != -100).sum(), context=state.context
        ...     )
        ...     accelerator.backward(loss)
    """
    check_accelerate("ulysses.trainer.same_data", accelerator)
    before = accelerator.state.device_mesh
    if state is not None:
        accelerator.state.device_mesh = _mesh(state.context.size)
    try:
        yield
    finally:
        accelerator.state.device_mesh = before


_meshes: dict[int, Any] = {}  # (world group, mesh) by sequence_parallel_size


def _mesh(size: int) -> Any:
    """Returns the device mesh replicas x sequence group. Collective, the first time."""
    import torch.distributed as dist

    if size not in _meshes or _meshes[size][0] is not dist.group.WORLD:
        from torch.distributed.device_mesh import init_device_mesh

        device = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
        shape, names = (dist.get_world_size() // size, size), ("dp_replicate", "cp")
        _meshes[size] = dist.group.WORLD, init_device_mesh(device, shape, mesh_dim_names=names)
    return _meshes[size][1]


def _with_labels(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a micro-batch with labels, without which models compute no loss."""
    labels = micro_batch.get("shift_labels")
    return {**micro_batch, **({} if labels is None else {"labels": labels})}


def _bytes_of(x: Any) -> memoryview:
    return memoryview(x.numpy()).cast("B")


def _use_attention(model: Any, state: ParallelState, evaluation: bool) -> None:
    """Makes a model call this package. If not `evaluation`, only in training.

    The name of the attention implementation is new, so other models of the process are not
    affected.
    """
    name, core = next(_names), model.config.get_text_config()._attn_implementation
    for table, former in zip(_tables(), _former(core)):
        if former is not None:
            table[name] = former
    _register(name, forwards.Registration(state.context, disable_in_eval=not evaluation))
    model.set_attn_implementation(name)


def _former(core: str) -> tuple[Any, Any]:
    """Returns the attention function and the mask function of an attention implementation.

    If this package computes it, as after another Trainer of the model, they are the functions that
    it has replaced. None for a function that there is not.
    """
    found = forwards.registered.get(core)
    if found is not None:
        return found.attention, found.mask
    attentions, masks = _tables()
    return attentions.get(core), masks.get(core)


def _check_options(operation: str, trainer: Any) -> None:
    """Raises Unsupported for an option of the Trainer that does not work with shards."""
    args, config = trainer.args, getattr(trainer.model, "config", None)
    accelerator, pc = trainer.accelerator, args.parallelism_config
    core = getattr(config and config.get_text_config(), "_attn_implementation", None)
    evaluates_whole = not trainer._sharded_evaluation
    loss = getattr(trainer.model, "loss_function", None)
    refused = (
        (
            config is None or not hasattr(trainer.model, "set_attn_implementation"),
            f"a {type(trainer.model).__name__}",
            "give a model of transformers, or its PeftModel",
        ),
        (
            not getattr(trainer, "model_accepts_loss_kwargs", False),
            f"{type(trainer.model).__name__} takes no num_items_in_batch",
            "its loss would be a mean over a rank's tokens; give another model",
        ),
        (
            not callable(loss) or "shift_labels" not in inspect.signature(loss).parameters,
            f"{type(trainer.model).__name__} with the loss {getattr(loss, '__name__', loss)}",
            "give a causal language model, whose loss takes shift_labels",
        ),
        (
            getattr(
                getattr(trainer.model, "active_peft_config", None), "is_prompt_learning", False
            ),
            "prompt learning of PEFT, which would put virtual tokens before the shard of every rank",
            "use LoRA",
        ),
        (
            args.neftune_noise_alpha is not None,
            f"neftune_noise_alpha={args.neftune_noise_alpha}, whose noise depends on the number of "
            "a rank's tokens",
            "leave it out",
        ),
        (
            evaluates_whole and _former(core or "")[0] is None,
            f"evaluation='whole' of a model with attn_implementation={core!r}",
            "load the model with attn_implementation='sdpa'",
        ),
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process", "start one rank a GPU with torchrun"),
        (args.deepspeed, "deepspeed", "leave it out; DistributedDataParallel reduces gradients"),
        (args.fsdp, f"fsdp={args.fsdp!r}", "leave it out"),
        (
            pc is not None and pc.total_size > 1,
            f"parallelism_config={pc!r}",
            "leave it out; sequence_parallel_size defines the groups",
        ),
        (args.torch_compile, "torch_compile=True", "set torch_compile=False"),
        (args.use_liger_kernel, "use_liger_kernel=True", "set use_liger_kernel=False"),
        (
            trainer.compute_loss_func is not None,
            "compute_loss_func, which would see the tokens of a rank",
            "override compute_loss, whose inputs are this rank's shard, instead",
        ),
        (
            args.label_smoothing_factor,
            f"label_smoothing_factor={args.label_smoothing_factor}",
            "set label_smoothing_factor=0",
        ),
        (
            getattr(config, "output_router_logits", False),
            "output_router_logits=True, whose balancing loss would be one of a rank's tokens",
            "set config.output_router_logits=False",
        ),
        (
            getattr(args, "predict_with_generate", False),
            "predict_with_generate=True",
            "set predict_with_generate=False, and generate on one rank",
        ),
        (
            accelerator.dispatch_batches,
            "accelerator_config dispatch_batches=True",
            "set dispatch_batches=False; each rank loads its data",
        ),
        (
            accelerator.split_batches,
            "accelerator_config split_batches=True",
            "set split_batches=False",
        ),
        (
            getattr(args, "train_sampling_strategy", None) == "batch_rebalance",
            "train_sampling_strategy='batch_rebalance', which gives each rank other data",
            "set train_sampling_strategy='random'",
        ),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "set auto_find_batch_size=False"),
        (
            args.include_num_input_tokens_seen not in ("no", False),
            f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}, which would "
            "count the tokens of every rank of a group",
            "set include_num_input_tokens_seen='no'",
        ),
    )
    for found, option, fix in refused:
        if found:
            raise Unsupported(
                f"{operation}: {option} does not work with sequence_parallel_size > 1; {fix}"
            )
