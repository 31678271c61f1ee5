"""Put this folder on PYTHONPATH and a run finds no Transformer Engine, whether or not it is installed."""

raise ImportError("Transformer Engine is hidden by tests/without_te")
