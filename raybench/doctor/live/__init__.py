"""The doctor on a living cluster: gather facts on every node, judge them, say what to do."""
