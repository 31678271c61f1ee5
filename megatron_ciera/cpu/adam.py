"""Adam in the shape that Megatron's distributed optimizer expects of Apex, computed by torch.

With torch's own AdamW Megatron cannot resume: its checkpoint code asks for the step of each parameter
before there is any state. Apex's FusedAdam keeps one step a group, and so does this one.
"""

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron_ciera.cpu.replace import replace


class FusedAdam(torch.optim.Optimizer):
    """Adam (`adam_w_mode=False`: L2 penalty) or AdamW with Apex's arguments and state.

    Group: `step` (int, absent before the first step). State of a parameter: `exp_avg` and `exp_avg_sq`, of
    its shape and dtype. Groups without parameters on this rank keep no step, as in Apex.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        unsupported = {"amsgrad": amsgrad, "capturable": capturable, "master_weights": master_weights}
        for name, value in unsupported.items():
            if value:
                raise ValueError(f"{name}={value} is not available on CPU, {name}=False is needed")
        if not bias_correction:
            raise ValueError("bias_correction=False is not available on CPU, bias_correction=True is needed")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._step_group(group)
        return loss

    def _step_group(self, group) -> None:
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not params:
            return
        for parameter in params:
            state = self.state[parameter]
            if len(state) == 0:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        update = adamw if self.adam_w_mode else adam
        update(
            params,
            [parameter.grad for parameter in params],
            [self.state[parameter]["exp_avg"] for parameter in params],
            [self.state[parameter]["exp_avg_sq"] for parameter in params],
            [],
            # torch counts the step up by itself.
            [torch.tensor(float(group["step"] - 1)) for _ in params],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def install() -> None:
    """Make it the Adam of `megatron.core.optimizer`, which then takes its path for Apex; idempotent."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    replace(optimizer, "Adam", FusedAdam)
    replace(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    replace(distrib_optimizer, "Adam", FusedAdam)
    replace(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    replace(distrib_optimizer, "USING_APEX_OPTIMIZER", True)
