"""The first run of a newcomer: real text, real Megatron-Core, our two main features, and the comparison."""
