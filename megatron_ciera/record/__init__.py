"""`--ciera-record PATH`: a trace of each iteration for scripts/simulate.py and Chrome's trace viewer."""
