"""Fast forms of the mechanisms; each is tested against the plain formula in the mechanism's own file."""
