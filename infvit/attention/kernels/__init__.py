"""Faster forms of what mechanisms compute, each tested against the plain one. Triton is imported when it is used."""
