"""gpuckpt: save a running process tree with its GPU state, move it, bring it back."""

__version__ = "0.1.0"
