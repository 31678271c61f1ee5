from megatron_ciera import metrics

VALUES = {
    "ciera/bytes_sent": 12345678,
    "ciera/ratio": 0.21671,
    "ciera/fallbacks": 0,
    "ciera/fallbacks/load": 0,
}


class Writer:
    """Collects what a TensorBoard or W&B writer would receive."""

    def __init__(self):
        self.received = []

    def add_scalar(self, name, value, iteration):
        self.received.append((name, value, iteration))

    def log(self, values, iteration):
        self.received.append((values, iteration))


def test_console_line_keeps_totals_and_drops_empty_parts():
    line = metrics.console_line(7, VALUES)
    assert line == (
        " [megatron-ciera] iteration        7 | ciera/bytes_sent: 12345678 | ciera/ratio: 0.2167 | ciera/fallbacks: 0"
    )


def test_values_of_single_layers_have_a_line_of_their_own():
    layers = {"moe/rank_load/layer_0": 1.25, "moe/rank_load/layer_12": 1.0, "moe/rank_load/mtp_0": 1.5}
    assert metrics.console_line(7, VALUES | layers) == metrics.console_line(7, VALUES)
    line = metrics.layers_line(7, VALUES | layers | {"moe/locality/layer_0": 0.0})
    assert line == (
        " [megatron-ciera] iteration        7 by layer | moe/rank_load: 0 1.25, 12 1, mtp_0 1.5 | moe/locality: 0 0"
    )
    assert metrics.layers_line(7, VALUES) is None


def test_writers_receive_every_value_and_may_be_absent():
    tensorboard, wandb = Writer(), Writer()
    metrics.write(VALUES, 3, tensorboard, wandb)
    assert tensorboard.received == [("megatron-ciera/" + name, value, 3) for name, value in VALUES.items()]
    assert wandb.received == [({"megatron-ciera/" + name: value for name, value in VALUES.items()}, 3)]
    metrics.write(VALUES, 3, None, None)
