"""Features called from Megatron's training loop: building, loading, stepping, logging, saving, ending.

Every wrapped function is a module global of `megatron.training.training`, looked up when `pretrain` runs, so
upstream scripts reach them unmodified. The wrappers add calls and change neither arguments nor results.
"""

import functools
import inspect

import torch

from megatron_ciera import metrics, observe
from megatron_ciera.feature import Feature, RunInfo
from megatron_ciera.observe import Observer
from megatron_ciera.seam import wrap


class TrainingLoop:
    """Calls `features`, in order, at the points that feature.py describes."""

    def __init__(self, features: list[Feature], run: RunInfo, observer: Observer | None):
        self.features = features
        self.run = run
        self.observer = observer
        self.model_chunks = None
        for feature in features:
            feature.run = run
            feature.peers = features

    def attach(self) -> None:
        """Wraps the seams. Raises ConfigurationError if the host has changed."""
        from megatron.training import training

        seams = (
            ("setup_model_and_optimizer", ("model_type",), self._around_setup),
            ("get_model", ("model_provider_func",), self._after_get_model),
            ("get_megatron_optimizer", ("config", "model_chunks"), self._after_optimizer),
            ("train_step", ("forward_step_func", "data_iterator", "model"), self._around_train_step),
            ("training_log", ("loss_dict", "total_loss_dict"), self._after_training_log),
            ("save_checkpoint", ("iteration", "model"), self._before_save),
            ("train", ("forward_step_func", "model"), self._after_train),
        )
        for name, parameters, around in seams:
            wrap(training, name, parameters, functools.partial(_wrapper, around))
        for feature in self.features:
            self.run.log(f"attached: {feature.name}")

    def _each(self, method: str, *args) -> None:
        for feature in self.features:
            getattr(feature, method)(*args)

    def _model_built(self, model_chunks: list) -> list:
        self.model_chunks = model_chunks
        self._each("model_built", model_chunks)
        return model_chunks

    def _around_setup(self, original, *args, **kwargs):
        container = kwargs.get("cfg_container")
        if container is not None and getattr(container, "model", None) is not None:
            # Megatron's own seam: called with the DDP-wrapped chunks before the optimizer is made.
            container.model.post_wrap_hooks.append(self._model_built)
        model, optimizer, scheduler = original(*args, **kwargs)
        from megatron.training import get_args

        self._each("loaded", model, optimizer, get_args().iteration)
        return model, optimizer, scheduler

    def _after_get_model(self, original, *args, **kwargs):
        return self._model_built(original(*args, **kwargs))

    def _after_optimizer(self, original, *args, **kwargs):
        optimizer = original(*args, **kwargs)
        self._each("optimizer_built", self.model_chunks, optimizer)
        return optimizer

    def _around_train_step(self, original, *args, **kwargs):
        iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"] + 1
        self._each("before_step", iteration)
        result = original(*args, **kwargs)
        self._each("after_step", iteration)
        return result

    def _after_training_log(self, original, *args, **kwargs):
        result = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        iteration = given["iteration"]
        if iteration % self.run.log_interval == 0:
            self._log(iteration, given["loss_dict"], given["grad_norm"])
        return result

    def _log(self, iteration: int, losses: dict, grad_norm) -> None:
        from megatron.training import get_tensorboard_writer, get_wandb_writer, print_rank_last

        values = self._metrics()
        self._each("logged", iteration, values)
        if values:
            print_rank_last(metrics.console_line(iteration, values))
            if (line := metrics.layers_line(iteration, values)) is not None:
                print_rank_last(line)
            metrics.write(values, iteration, get_tensorboard_writer(), get_wandb_writer())
        if self.observer and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            self.observer.iteration(iteration, losses, grad_norm, values)

    def _metrics(self) -> dict[str, float]:
        values = {}
        for feature in self.features:
            values.update(feature.metrics())
        return values

    def _before_save(self, original, *args, **kwargs):
        self._each("before_save", inspect.signature(original).bind(*args, **kwargs).arguments["iteration"])
        return original(*args, **kwargs)

    def _after_train(self, original, *args, **kwargs):
        result = original(*args, **kwargs)
        trained = self._has_trained(reached=result[0])
        self._each("finished")
        values = self._metrics()
        features = self.features if trained else []
        done = {flag: what for feature in features for flag, what in feature.effect().items()}
        idle = {flag: why for feature in features for flag, why in feature.without_effect().items()}
        for flag, what in done.items():
            self.run.log(f"{flag}: {what}")
        for flag, why in idle.items():
            self.run.log(f"{flag} had no effect: {why}")
        if self.observer:
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                self.observer.tail(values, done, idle)
            self.observer.parameters(self.model_chunks, torch.distributed.get_rank())
        return result

    def _has_trained(self, reached: int) -> bool:
        """Whether there was an iteration; says the way out if not."""
        from megatron.training import get_args

        args = get_args()
        if reached != args.iteration:
            return True
        flag = "--train-iters" if args.train_samples is None else "--train-samples"
        self.run.log(
            f"{observe.UNTRAINED} the checkpoint is at iteration {reached} and training ends at {args.train_iters} "
            f"({flag}), both counted from the first iteration. Raise {flag}, or load an earlier checkpoint "
            "(--ckpt-step)"
        )
        return False


def _wrapper(around, original):
    def replacement(*args, **kwargs):
        return around(original, *args, **kwargs)

    return replacement
