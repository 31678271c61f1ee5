"""Step times projected from a config or a recorded trace; needs neither Megatron nor torch. See docs/simulator.md."""
