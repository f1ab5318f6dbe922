"""Fast forms of the mechanisms; each is tested against the plain formula in the mechanism's own file.

Triton is imported where it is used: not every machine has it.
"""
